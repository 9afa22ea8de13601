"""Workers and trainers that are killed or stopped between the two phases of a version."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from tests.scale.staging_processes import QUIET, Said, heard, start, train, weights, work

from sync_core import Receiver, Sender, SenderLostError, SendError, WorkerLostError
from sync_plugin_scale import AbortedError, TwoPhase
from sync_plugin_scale.two_phase import receiver as staging
from sync_testing.worker_groups import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(90)]


def committed(line: Connection) -> int:
    """The version that a worker has committed next, whatever it says before."""
    while isinstance(said := heard(line), str):
        assert "waits" in said
    return int(said)


SCHEMES = ["shm", "dist"]


@contextmanager
def running(function: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    process, line = start(function, *args)
    try:
        yield process, line
    finally:
        process.kill()
        process.join(30)
        line.close()


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.Queue[str]]:
    """The messages that workers of this process log about a staged version."""
    monkeypatch.setattr(staging, "_QUIET", QUIET)
    messages: queue.Queue[str] = queue.Queue()
    handler = Said(messages.put)
    log = logging.getLogger("sync_core")
    log.addHandler(handler)
    yield messages
    log.removeHandler(handler)


@pytest.mark.parametrize("inner", SCHEMES)
@pytest.mark.parametrize("failed", ["abort", "leave_out"])
def test_a_worker_is_killed_after_it_has_staged(inner: str, failed: str, ends: ExitStack) -> None:
    scheme = TwoPhase(inner, failed=failed)  # type: ignore[arg-type]
    threads = ends.enter_context(ThreadPoolExecutor())
    sender = ends.enter_context(Sender(scheme, weights(1.0), num_workers=2, timeout=30.0))
    process, line = ends.enter_context(running(work, sender.address(1)))
    model = weights()
    receiver = ends.enter_context(Receiver(sender.address(0), model))
    assert heard(line) == "ready"
    pending = sender.send_async()
    assert "has staged a version and waits" in heard(line)
    process.kill()
    process.join(30)
    waiting = threads.submit(pending.wait)
    receiving = threads.submit(receiver.receive, 5.0 if failed == "leave_out" else 1.0)
    failure = waiting.exception(30)
    assert isinstance(failure, SendError)
    workers = failure.report.workers
    assert isinstance(workers[1].error, WorkerLostError)
    if failed == "leave_out":
        assert (receiving.result(), workers[0].version) == (1, 1)
    else:
        assert receiving.result() is None
        assert isinstance(workers[0].error, AbortedError)
        assert "worker 1" in workers[0].error.message
        assert (model["w"] == 0).all()
    # Another one in its place.
    with running(work, sender.address(1)) as (_, other):
        assert heard(other) == "ready"
        newest = 1
        if failed == "abort":
            pending, newest = sender.send_async(), 2
            assert receiver.receive(30.0) == newest
            assert pending.wait().updated == (0, 1)
        assert committed(other) == newest
        assert eventually(lambda: sender.workers[1].version == newest, 30)


@pytest.mark.parametrize("inner", SCHEMES)
def test_the_trainer_is_killed_between_the_phases(
    inner: str, ends: ExitStack, said: queue.Queue[str]
) -> None:
    process, line = ends.enter_context(running(train, TwoPhase(inner), 30.0))
    model = weights()
    receiver = ends.enter_context(Receiver(heard(line)[0], model))
    threads = ends.enter_context(ThreadPoolExecutor())
    line.send(1.0)
    receiving = threads.submit(receiver.receive, 30.0)
    assert "has staged a version and waits" in said.get(timeout=30)
    process.kill()
    failure = receiving.exception(30)
    assert isinstance(failure, SenderLostError)
    assert "the model keeps the version that it has" in str(failure)
    assert receiver.version == 0
    assert (model["w"] == 0).all()


def receive_until(ended: threading.Event, receiver: Receiver) -> None:
    while not ended.is_set():
        receiver.receive(0.1)


@pytest.mark.parametrize("inner", SCHEMES)
def test_a_trainer_that_is_cut_off_is_waited_for_and_then_left(
    inner: str, ends: ExitStack, said: queue.Queue[str]
) -> None:
    scheme = TwoPhase(inner, wait=1.5)
    process, line = ends.enter_context(running(train, scheme, 20.0))
    addresses = heard(line)
    models = [weights(), weights()]
    receivers = [
        ends.enter_context(Receiver(address, model))
        for address, model in zip(addresses, models, strict=True)
    ]
    threads = ends.enter_context(ThreadPoolExecutor())
    line.send(1.0)
    ended = threading.Event()
    receiving = threads.submit(receive_until, ended, receivers[0])
    assert "waits for the sender's decision" in said.get(timeout=30)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert "dropped a staged version" in said.get(timeout=30)
        ended.set()
        receiving.result(30)
        assert (models[0]["w"] == 0).all()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    # It has withdrawn what it said, so that no other commits the version.
    assert heard(line) == {0: 0, 1: 0}
    assert receivers[1].receive(0.2) is None
    line.send(2.0)
    received = [threads.submit(receiver.receive, 30.0) for receiver in receivers]
    assert [each.result() for each in received] == [2, 2]
    assert heard(line) == {0: 2, 1: 2}
    assert all((model["w"] == 2).all() for model in models)
