"""A process that a trainer has forked hides the trainer's death from no worker."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch import nn

from sync_core import Receiver, Sender, SenderLostError
from sync_plugin_std.workers import ProcessGroup

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="fork and pidfd of Linux")

_SCHEMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("shm", {}),
    ("mp", {}),
    ("dist", {}),
    ("dist", {"shared_memory": False}),
)
# Of a machine that is busy; without a watch, it would be the time for which the child lives.
_SOON = 20.0


def _fork(by: str) -> int:
    """Fork a process that lives on: by Python, or by a library, which runs no hook of Python's."""
    child = os.fork() if by == "python" else ctypes.PyDLL(None).fork()
    if child == 0:
        signal.alarm(100)
        while True:
            signal.pause()
    return int(child)


def _train(news: Connection, by: str, scheme: str, options: dict[str, Any]) -> None:
    with Sender(scheme, nn.Linear(2, 2), num_workers=1, timeout=60.0, **options) as sender:
        news.send(sender.address(0))
        sender.send()
        news.send(_fork(by))
        news.recv()


def _host(news: Connection, by: str) -> None:
    with ProcessGroup(lambda _: [], 1) as group:
        news.send(group.call(0, lambda _: (os.getpid(), os.getppid())).result(60))
        news.send(_fork(by))
        news.recv()


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Processes that are killed at the end, after those that have forked them."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for process in multiprocessing.active_children():
        process.join(10)  # it waits until no child has the end of a pipe either


def _start(target: Any, *args: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=target, args=(its, *args), daemon=True)
    process.start()
    its.close()
    return process, mine


@pytest.mark.parametrize(("scheme", "options"), _SCHEMES)
@pytest.mark.parametrize("by", ["python", "a library"])
def test_a_trainer_that_is_killed(
    by: str, scheme: str, options: dict[str, Any], children: list[int]
) -> None:
    trainer, news = _start(_train, by, scheme, options)
    address = news.recv()
    with Receiver(address, nn.Linear(2, 2)) as receiver:
        assert receiver.receive(60.0) == 1
        children.append(news.recv())
        trainer.kill()
        begun = time.monotonic()
        with pytest.raises(SenderLostError):
            receiver.receive(100.0)
    if scheme != "mp":
        # Whatever holds the listener does not answer.
        with pytest.raises(SenderLostError):
            Receiver(address, nn.Linear(2, 2), timeout=_SOON if by == "python" else 2.0)
    assert time.monotonic() - begun < _SOON


@pytest.mark.parametrize("by", ["python", "a library"])
def test_a_host_of_workers_that_is_killed(by: str, children: list[int]) -> None:
    host, news = _start(_host, by)
    ends = [os.pidfd_open(pid) for pid in news.recv()]  # of the worker, and of the fork server
    children.append(news.recv())
    host.kill()
    try:
        for end in ends:
            assert multiprocessing.connection.wait([end], _SOON), "what it has started must end"
    finally:
        for end in ends:
            os.close(end)
