"""Chunks of a payload in Ray's object store."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import ray
import torch

from sync_core import Payload, Update
from sync_plugin_ray.store import Cutter, ObjectStore, join, read

SIZES = [
    [10],
    [70_000],
    [70_000, 3, 500_000, 1, 1, 70_016],
    [300_001, 300_000, 16, 300_000],
    [5] * 3000,
]
LARGE = [[1_100_000] * 4, [10, 3_000_000, 7, 1_100_000], [5_000_000, 2_100_001, 70_000, 3]]


def whole(stretches: list[list[Any]]) -> bytes:
    return b"".join(piece.tobytes() for stretch in stretches for piece in stretch)


def payload_of(sizes: list[int]) -> Payload:
    update = Update.of({f"tensor{i}": torch.randn(n) for i, n in enumerate(sizes)})
    return Payload(1, update.layout, update.tensors)


@pytest.mark.parametrize("sizes", SIZES + LARGE)
def test_the_pieces_are_the_payload(sizes: list[int]) -> None:
    cutter = Cutter()
    for payload in (payload_of(sizes), payload_of(sizes), payload_of([7, 90_000])):
        again = Payload.from_bytes(whole(cutter.cut(payload)), 1)
        assert again.layout == payload.layout
        assert all(map(torch.equal, again.tensors, payload.tensors))


@pytest.mark.parametrize("sizes", SIZES[2:])
def test_ray_lays_them_side_by_side(sizes: list[int]) -> None:
    publication = ObjectStore(10**8, None).put(payload_of(sizes))
    (pieces,) = ray.get(publication.data)
    assert join(pieces).ctypes.data == np.frombuffer(pieces[0], dtype=np.uint8).ctypes.data


@pytest.mark.parametrize("sizes", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_version_is_two_objects_of_whole_tensors(
    sizes: list[int], dtype: torch.dtype
) -> None:
    update = Update.of({f"tensor{i}": torch.rand(4 * n).to(dtype) for i, n in enumerate(sizes)})
    payload = Payload(1, update.layout, update.tensors)
    publication = ObjectStore(2 * 10**8, None).put(payload)
    assert len(publication.data) == 2
    received = Payload.unpack(read(ray.get(publication.data)), 1)
    assert all(map(torch.equal, received.tensors, payload.tensors))
    lost = publication.data
    assert publication.put_again(lost)
    assert not set(lost) & set(publication.data)
    again = Payload.unpack(read(ray.get(publication.data)), 1)
    assert all(map(torch.equal, again.tensors, payload.tensors))


def test_pieces_that_lie_apart_are_copied() -> None:
    pieces = [np.full(64, i, dtype=np.uint8) for i in range(3)][::-1]
    assert join(pieces).tolist() == [2] * 64 + [1] * 64 + [0] * 64


@pytest.mark.parametrize("sizes", SIZES[1:] + LARGE[:1])
def test_tensors_that_lie_side_by_side_are_put_as_one_object(sizes: list[int]) -> None:
    payload = Payload.from_bytes(payload_of(sizes).to_bytes(), 1)
    ((_, body),) = Cutter().cut(payload)
    assert body.ctypes.data == payload.tensors[0].data_ptr()
    publication = ObjectStore(10**8, None).put(payload)
    (pieces,) = ray.get(publication.data)
    assert join(pieces).ctypes.data == np.frombuffer(pieces[0], dtype=np.uint8).ctypes.data
    received = Payload.unpack(read([pieces]), 1)
    assert all(map(torch.equal, received.tensors, payload.tensors))


def test_a_view_keeps_the_object() -> None:
    sizes = [100_000] * 30
    payload, store = payload_of(sizes), ObjectStore(10**8, None)
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
    again = Payload.from_bytes(whole(Cutter().cut(cut)), 1)
    assert all(map(torch.equal, again.tensors, conj.tensors))
