"""What a payload is cut into, and what comes of it in Ray's object store."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import ray
import torch

from sync_core import Payload, Update
from sync_plugin_ray.pieces import Cutter, join
from sync_plugin_ray.store import Store, read

SIZES = [
    [10],
    [70_000],
    [70_000, 3, 500_000, 1, 1, 70_016],
    [300_001, 300_000, 16, 300_000],
    [5] * 3000,
]


def payload_of(sizes: list[int]) -> Payload:
    update = Update.of({f"tensor{i}": torch.randn(n) for i, n in enumerate(sizes)})
    return Payload(1, update.layout, update.tensors)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_pieces_are_the_payload(sizes: list[int]) -> None:
    cutter = Cutter()
    for payload in (payload_of(sizes), payload_of(sizes), payload_of([7, 90_000])):
        again = Payload.from_bytes(np.concatenate(cutter.cut(payload)).tobytes(), 1)
        assert again.layout == payload.layout
        assert all(map(torch.equal, again.tensors, payload.tensors))


@pytest.mark.parametrize("sizes", SIZES[2:])
def test_ray_lays_them_side_by_side(sizes: list[int]) -> None:
    publication = Store(10**8, None).put(payload_of(sizes))
    pieces: Any = ray.get(publication.data)  # type: ignore[arg-type]
    assert join(pieces).ctypes.data == np.frombuffer(pieces[0], dtype=np.uint8).ctypes.data


def test_pieces_that_lie_apart_are_copied() -> None:
    pieces = [np.full(64, i, dtype=np.uint8) for i in range(3)][::-1]
    assert join(pieces).tolist() == [2] * 64 + [1] * 64 + [0] * 64


def test_a_view_keeps_the_object() -> None:
    sizes = [100_000] * 30
    payload, store = payload_of(sizes), Store(10**8, None)
    publication = store.put(payload)
    reference: Any = publication.data
    received = Payload.unpack(read(ray.get(reference)), 1)
    last = received.tensors[-1]
    del publication, reference, received
    for _ in range(45):
        gc.collect()
        store.put(payload_of(sizes))
    assert torch.equal(last, payload.tensors[-1])


def test_tensors_that_are_no_plain_memory_are_packed() -> None:
    update = Update.of({"t": torch.randn(600, 600).t(), "conj": torch.randn(600, 300) * 1j})
    conj = Update(update.layout, [update.tensors[0], update.tensors[1].conj()])
    cut = Payload(1, conj.layout, conj.tensors)
    again = Payload.from_bytes(np.concatenate(Cutter().cut(cut)).tobytes(), 1)
    assert all(map(torch.equal, again.tensors, conj.tensors))
