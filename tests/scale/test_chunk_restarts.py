"""Chunks that a worker asks for again: neither end does that without a limit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import Answer, Payload, Receiver, ReceiverTransport, Sender, SendError
from sync_plugin_scale import Chunked
from sync_plugin_scale.relays.receiver import ChunkedReceiver, ReceivedChunk


class _Repeating(ReceiverTransport):
    """A scheme that is asked for its newest version, which is always the same one."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.refused = 0

    def receive(self, timeout: float) -> Payload | None:
        del timeout
        return self.payload

    def acknowledge(self, answer: Answer) -> None:
        assert answer.request == "again"
        self.refused += 1

    def close(self) -> None:
        """Nothing is open."""


def chunked(receiver: Receiver) -> ChunkedReceiver:
    transport: Any = receiver._connection.transport
    assert isinstance(transport, ChunkedReceiver)
    return transport


def test_a_wrong_chunk_that_comes_again_and_again_ends_receive_at_its_deadline() -> None:
    model = nn.Linear(40, 40)
    with Sender(Chunked("thread", mb=0.001), model, num_workers=1, timeout=5) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(40, 40))
        pending = sender.send_async()
        transport = chunked(receiver)
        # The second chunk: without the first, it cannot be used.
        first = transport.next_chunk(5)
        assert first is not None
        transport.keep(first)
        second = transport._lanes[1].receive(5)
        assert second is not None
        transport._version, transport._next = None, 0
        lanes, repeating = transport._lanes, _Repeating(second)
        transport._lanes = [repeating, repeating]
        started = time.monotonic()
        assert receiver.receive(0.2) is None
        assert receiver.receive(0) is None
        assert time.monotonic() - started < 5
        assert repeating.refused > 1
        transport._lanes = lanes
        transport._lanes[1].acknowledge(
            replace(Answer.refusal(second.version, ValueError("no")), request="again")
        )
        assert receiver.receive(5) == 1
        assert pending.wait().updated == (0,)


class _Misreading(ChunkedReceiver):
    """Takes each chunk for another, and so asks for the version again each time."""

    def _read(self, payload: Payload, lane: int) -> ReceivedChunk:
        return replace(super()._read(payload, lane), index=1)


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_a_worker_that_asks_for_ever_fails_and_costs_the_others_nothing(scheme: str) -> None:
    model, good = nn.Linear(40, 40), nn.Linear(40, 40)
    with Sender(Chunked(scheme, mb=0.001), model, num_workers=2, timeout=20) as sender:
        receivers = [
            Receiver(sender.address(0), good),
            Receiver(sender.address(1), nn.Linear(40, 40)),
        ]
        for _ in range(2):
            pending = sender.send_async()
            chunked(receivers[1]).__class__ = _Misreading
            assert receivers[1].receive(0.5) is None
            receivers[0].receive(5)
            with pytest.raises(SendError, match=r"1 of 2 workers.*\n.*asked 33 times for version"):
                pending.wait()
            assert torch.equal(model.weight, good.weight)
        chunked(receivers[1]).__class__ = ChunkedReceiver
        pending = sender.send_async()
        for receiver in receivers:
            receiver.receive(5)
        assert pending.wait().updated == (0, 1)
        for receiver in receivers:
            receiver.close()


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_a_first_chunk_that_crosses_an_answer_costs_no_version(scheme: str) -> None:
    model, copy = nn.Linear(40, 40), nn.Linear(40, 40)
    with Sender(Chunked(scheme, mb=0.003), model, num_workers=1, timeout=20) as sender:
        receiver = Receiver(sender.address(0), copy)
        pending = sender.send_async()
        transport = chunked(receiver)
        first = transport.next_chunk(5)
        assert first is not None
        second = transport._lanes[1].receive(5)
        assert second is not None
        again = replace(Answer.refusal(second.version, ValueError("no")), request="again")
        second.release()
        transport._lanes[1].acknowledge(again)
        # Of three chunks, none would come after the second to show that it is missing.
        assert transport._version is not None
        assert transport._version.count == 3
        # The sender has begun once more, and the answer to its first chunk is too late.
        second = transport._lanes[1].receive(5)
        assert second is not None
        transport.keep(first)
        transport.keep(transport._read(second, 1))
        assert receiver.receive(3) == 1
        assert pending.wait().updated == (0,)
        assert torch.equal(model.weight, copy.weight)
        receiver.close()
