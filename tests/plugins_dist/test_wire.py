"""The ends of a wire find each other, or give up in time."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sync_plugin_dist.process_group import Link, TensorGroup
from sync_plugin_dist.rendezvous import BrokenGroupError, Rendezvous
from sync_plugin_std.local import Message

pytestmark = pytest.mark.timeout(60)

LINK = Link(backend="gloo", collective=False, interface="127.0.0.1", timeout=2.0)


class Nobody:
    """Control of a transfer that nothing interrupts."""

    def register(self, poll: select.poll) -> None:
        raise NotImplementedError

    def interrupts(self) -> bool:
        return False


class Quiet(Nobody):
    """Control that nothing comes from, up to the end of a transfer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def register(self, poll: select.poll) -> None:
        poll.register(self._descriptor, select.POLLIN)


class Ends:
    """The two ends of a wire, in this process."""

    def __init__(self) -> None:
        self._told: list[list[Message]] = [[], []]

    def rendezvous(self, rank: int, *, leave: bool = False) -> Rendezvous:
        """Return the rendezvous of an end; one that leaves waits for no keys."""

        def hear(seconds: float) -> None:
            del seconds
            time.sleep(0.01)
            if leave:
                raise BrokenGroupError("it has left")
            while self._told[1 - rank]:
                known.put(self._told[1 - rank].pop(0))

        known = Rendezvous(1, self._told[rank].append, hear, timeout=LINK.timeout)
        return known


def beside(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def connected(link: Link) -> tuple[TensorGroup, TensorGroup]:
    """Both ends of a wire."""
    ends = Ends()
    wires: list[TensorGroup] = []
    made = beside(lambda: wires.append(TensorGroup(link, ends.rendezvous(0), 0, 2)))
    other = TensorGroup(link, ends.rendezvous(1), 1, 2)
    made.join()
    return wires[0], other


def test_parts_may_take_as_long_as_was_agreed() -> None:
    wires = connected(LINK)
    part, place = torch.arange(5.0), torch.zeros(5)

    def send() -> None:
        time.sleep(LINK.timeout * 0.6)
        wires[0].send(part)
        wires[0].finish(7)

    sending = beside(send)
    wires[1].receive([place], 7, Nobody())
    sending.join()
    wires[0].settle()
    assert torch.equal(place, part)
    wires[0].close()
    wires[1].close()


def test_a_version_that_was_given_up_and_overwritten_is_refused() -> None:
    sender, receiver = connected(replace(LINK, collective=True))
    part, place = torch.ones(1 << 16), torch.zeros(1 << 16)
    sender.send(part)
    sender.finish(7)
    # What tells the worker of that may come later than the parts.
    sender.close()
    part.fill_(2.0)
    reading, writing = os.pipe()
    try:
        with pytest.raises(BrokenGroupError):
            receiver.receive([place], 7, Quiet(reading))
    finally:
        receiver.close()
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_end_has_gone_when_they_connect(rank: int) -> None:
    ends = Ends()
    with pytest.raises(BrokenGroupError, match="it has left"):
        TensorGroup(LINK, ends.rendezvous(1 - rank, leave=True), 1 - rank, 2)
    begin = time.monotonic()
    with pytest.raises(BrokenGroupError):
        TensorGroup(LINK, ends.rendezvous(rank), rank, 2)
    assert time.monotonic() - begin < LINK.timeout + 20
