"""Answers that the waiting thread reads, over every scheme for one machine: none is lost."""

from __future__ import annotations

import math
import os
import random
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, cast

import pytest
import torch
from torch import nn

from sync_core import (
    Answer,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    WorkerState,
)
from sync_testing import eventually

pytestmark = pytest.mark.timeout(60)


@contextmanager
def workers(sender: Sender) -> Iterator[list[Receiver]]:
    """A thread for each worker, which receives until the sender closes."""
    receivers = [Receiver(sender.address(i), nn.Linear(2, 2)) for i in sender.all_worker_ids()]

    def receive(receiver: Receiver) -> None:
        with suppress(SenderLostError):
            while True:
                receiver.receive()

    threads = [threading.Thread(target=receive, args=(receiver,)) for receiver in receivers]
    for thread in threads:
        thread.start()
    try:
        yield receivers
    finally:
        sender.close()
        for thread in threads:
            thread.join()


@contextmanager
def later(function: Callable[[], None]) -> Iterator[None]:
    """Call a function while the block runs, which ends when the function has returned."""
    timer = threading.Timer(0.2, function)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def are_current(sender: Sender) -> bool:
    return all(status.state is WorkerState.CURRENT for status in sender.workers.values())


@pytest.mark.parametrize("scheme", ["shm", "dist"])
def test_no_answer_is_lost_when_the_thread_waits_no_longer(scheme: str) -> None:
    random_ = random.Random(0)
    with Sender(scheme, nn.Linear(2, 2), num_workers=2) as sender, workers(sender):
        for _ in range(200):
            pending = sender.send_async()
            with suppress(SendError):
                pending.wait(random_.choice([0.0, 0.0001, 0.0005, 0.001]))
            assert eventually(lambda: are_current(sender), 10)


@pytest.mark.parametrize("written", [os.urandom(1024), None], ids=["noise", "no answer"])
def test_a_worker_can_spoil_its_own_words_alone(written: bytes | None) -> None:
    """A page with wrong records fails the deliveries of its worker alone."""
    with (
        Sender("shm", nn.Linear(2, 2), num_workers=2, timeout=10.0) as sender,
        workers(sender) as receivers,
    ):
        sender.send()
        transport: Any = receivers[0]._connection.transport
        if written is None:
            # Well-formed, and nothing that a worker could have measured.
            transport._page.write_answer(Answer(version=1, stage_seconds=math.inf), [])
        else:
            transport._page._bytes[:1024] = written
            transport._page._bytes[2048:3072] = written
        # As if it had been killed there: it does not answer again.
        transport.acknowledge = lambda answer: transport._answers.set()
        with pytest.raises(SendError) as failed:
            sender.send(timeout=2.0)
        assert list(failed.value.report.failed) == [0]
        assert failed.value.report.updated == (1,)
        with suppress(SendError):
            sender.send(timeout=0.5)
        assert sender.workers[1].version == 3


def test_a_sender_that_is_closed_ends_the_wait_at_once() -> None:
    with (
        Sender("shm", nn.Linear(2, 2), num_workers=1, timeout=30.0) as sender,
        closing(Receiver(sender.address(0), nn.Linear(2, 2))),
    ):
        pending = sender.send_async()
        with later(sender.close), pytest.raises(SendError, match="the sender was closed"):
            pending.wait()


def test_an_answer_that_comes_after_the_worker_has_asked_for_more() -> None:
    """As where a thread of the worker stages: the answer is found, and frees nothing newer."""
    model, copy = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    with (
        Sender("shm", model, num_workers=1, timeout=10.0) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        transport: Any = receiver._connection.transport
        pending = sender.send_async()
        first = transport.receive(10.0)
        assert transport.receive(0.1) is None  # asks for more
        answer = Answer(version=1)
        with later(lambda: transport.acknowledge(answer)):
            assert pending.wait().updated == (0,)
        pending = sender.send_async()
        second = transport.receive(10.0)
        assert transport.receive(0.1) is None
        sending = cast("Any", sender)._pipeline.transport
        assert eventually(lambda: sending._peers[0].unanswered == 2)
        held = transport._slots._held.copy()
        transport._slots._held.clear()  # as it was before the second was accepted
        transport.acknowledge(answer)
        transport._slots._held |= held
        assert eventually(lambda: not select.select([transport._answers.reader], [], [], 0)[0])
        with sending._publisher.lock:
            assert [slot.version for slot in sending._publisher.slots if slot.readers] == [2]
        with later(lambda: transport.acknowledge(Answer(version=2))):
            assert pending.wait().updated == (0,)
        first.release()
        second.release()
