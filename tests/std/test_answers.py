"""Answers of `shm` and `mp` that the waiting thread reads: whole, from their worker, never lost."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sync_core import (
    Answer,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    WorkerLostError,
    WorkerState,
)
from sync_core.testing.worker_groups import eventually
from sync_plugin_std.answers import AnswerPipe, write_answer

pytestmark = pytest.mark.timeout(60)

seconds = st.floats(0, 1e9)
moments = st.none() | seconds
answers = st.builds(
    Answer,
    version=st.integers(0, 2**64 - 1),
    stage_seconds=seconds,
    commit_seconds=seconds,
    pause_seconds=seconds,
    known_at=moments,
    answered_at=moments,
    clock=st.none() | st.integers(1, 2**64 - 1).map("{:016x}".format),
)


@given(st.lists(st.tuples(answers, st.lists(st.integers(0, 2**64 - 1), max_size=4)), max_size=20))
def test_answers_arrive_as_they_were_given(given: list[tuple[Answer, list[int]]]) -> None:
    with closing(AnswerPipe()) as pipe:
        assert all(write_answer(pipe.writer, answer, held) for answer, held in given)
        assert pipe.read() == given
        assert pipe.read() == []


@pytest.mark.parametrize(
    "answer",
    [Answer.refusal(1, ValueError("no")), Answer(version=1, digest="0" * 16)],
    ids=["refusal", "digest"],
)
def test_text_takes_the_socket(answer: Answer) -> None:
    with closing(AnswerPipe()) as pipe:
        assert not write_answer(pipe.writer, answer, [])
        assert not write_answer(pipe.writer, Answer(version=1), [1, 2, 3, 4, 5])


@given(st.binary(min_size=1, max_size=500))
def test_other_bytes_are_no_answers_or_harmless_ones(data: bytes) -> None:
    with closing(AnswerPipe()) as pipe:
        os.write(pipe.writer, data)
        with suppress(ValueError):
            for answer, _ in pipe.read():
                assert Answer.from_message(answer.to_message()) == answer


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


def are_current(sender: Sender) -> bool:
    return all(status.state is WorkerState.CURRENT for status in sender.workers.values())


def test_no_answer_is_lost_when_the_thread_waits_no_longer() -> None:
    random_ = random.Random(0)
    with Sender("shm", nn.Linear(2, 2), num_workers=2) as sender, workers(sender):
        for _ in range(300):
            pending = sender.send_async()
            with suppress(SendError):
                pending.wait(random_.choice([0.0, 0.0001, 0.0005, 0.001]))
            assert eventually(lambda: are_current(sender), 10)


def test_a_worker_that_writes_something_else_is_lost_alone() -> None:
    with (
        Sender("shm", nn.Linear(2, 2), num_workers=2, timeout=5.0) as sender,
        workers(sender) as receivers,
    ):
        sender.send()
        transport = receivers[0]._transport
        os.write(transport._answers, b"x" * 10)  # type: ignore[attr-defined]
        with suppress(SendError):
            sender.send()  # its answer may have come before any thread waited
        with pytest.raises(SendError, match="does not answer as agreed") as failed:
            sender.send()
        assert isinstance(failed.value.report.failed[0].error, WorkerLostError)
        assert failed.value.report.updated == (1,)


def test_a_sender_that_is_closed_ends_the_wait_at_once() -> None:
    with (
        Sender("shm", nn.Linear(2, 2), num_workers=1, timeout=30.0) as sender,
        closing(Receiver(sender.address(0), nn.Linear(2, 2))),
    ):
        pending = sender.send_async()
        threading.Timer(0.2, sender.close).start()
        with pytest.raises(SendError, match="the sender was closed"):
            pending.wait()
