"""Memory is taken for what the agreed layout gives reason for, and for nothing larger."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor, nn

from sync_core import Layout, Payload, Receiver, Sender, SenderTransport
from sync_core.errors import PayloadError
from sync_core.transports import RESERVED_PREFIX
from sync_plugin_scale import Chunked
from sync_plugin_scale.increments.patch import Patch, shorten
from sync_plugin_scale.relays.sender import ChunkedSender
from sync_testing.fuzz import find

pytestmark = pytest.mark.timeout(60)

GIB = 1 << 30


def bomb(nbytes: int) -> bytes:
    """Return a frame of zstd that becomes so many zeros."""
    writer = zstandard.ZstdCompressor(level=3).compressobj(size=nbytes)
    parts = [writer.compress(bytes(1 << 24)) for _ in range(nbytes >> 24)]
    return b"".join([*parts, writer.flush()])


def receive(sender: Sender, transport: SenderTransport, named: dict[str, Tensor]) -> None:
    """Have a receiver get what no sender packs."""
    payload = Payload(
        1,
        Layout.of_kinds([(n, t.dtype, tuple(t.shape)) for n, t in named.items()]),
        tuple(named.values()),
    )
    with Receiver(sender.address(0), nn.Linear(3, 2)) as receiver:
        thread = threading.Thread(target=transport.send, args=(payload, (0,)))
        thread.start()
        try:
            receiver.receive(10.0)
        finally:
            thread.join()


@pytest.mark.parametrize("scheme", ["shm", "dist"])
@pytest.mark.parametrize("claimed", [False, True], ids=["true", "claimed"])
def test_what_is_compressed(scheme: str, claimed: bool) -> None:
    data = bytearray(bomb(GIB))
    if claimed:
        data = bytearray(zstandard.ZstdCompressor().compress(b"x" * 70_000))
        assert data[4] & 0xC0 == 0x80
        data[5:9] = (0xFFFF_FFF0).to_bytes(4, "little")
    content = torch.frombuffer(data, dtype=torch.uint8)
    with Sender(scheme, nn.Linear(3, 2), num_workers=1, layers=["zstd"], timeout=10.0) as sender:
        transport: Any = sender._pipeline.transport
        with pytest.raises(PayloadError, match="no version has over"):
            receive(sender, transport, {"__zstd__": content})


def test_a_compressed_patch() -> None:
    units, body = 1 << 34, np.ones(64, np.uint8)
    patch = Patch(1, 2, "0" * 64, None, len(body), shorten(np.array([3])), body[:1])
    data = bytearray(patch.to_tensor("zstd").numpy().tobytes())
    assert len(Patch.from_tensor(torch.frombuffer(data, dtype=torch.uint8), len(body)).values) == 1
    places = {"positions": 24, "gaps": 32, "units": 40}
    for names in (["units"], ["units", "positions", "gaps"], ["gaps"]):
        wrong = bytearray(data)
        for name in names:
            wrong[places[name] : places[name] + 8] = units.to_bytes(8, "little")
        with pytest.raises(PayloadError, match="not a patch"):
            Patch.from_tensor(torch.frombuffer(wrong, dtype=torch.uint8), len(body))


@pytest.mark.parametrize(
    "head",
    [
        [1, 0, 12 * GIB, 1000],
        [1, 0, 1 << 60, 1000],
        [1, 0, -5, 1000],
        [1, 0, 5000, 0],
        [1, 0, 5000, -1],
        [1, 0, 500, 1000],
        [1, 0, 5000, 999],
        [1, -1, 5000, 1000],
        [1, 7, 5000, 1000],
        [1, 0, 5000],
    ],
    ids=str,
)
def test_heads_of_chunks(head: list[int]) -> None:
    chunk: dict[str, Any] = {RESERVED_PREFIX + "chunk": torch.ones(1000, dtype=torch.uint8)}
    with Sender(Chunked("shm", mb=0.001), nn.Linear(3, 2), num_workers=1, timeout=10.0) as sender:
        (chunks,) = find(sender, ChunkedSender)
        with pytest.raises(PayloadError, match="chunk"):
            receive(
                sender,
                chunks._lanes[0],
                chunk | {RESERVED_PREFIX + "chunk_head": torch.tensor(head)},
            )
