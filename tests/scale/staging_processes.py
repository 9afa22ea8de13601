"""A worker and a trainer in processes, for `test_two_phase_faults`."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from sync_core import Address, Receiver, Sender, SendError
from sync_plugin_scale import TwoPhase
from sync_plugin_scale.two_phase import receiver as staging

SPAWN = multiprocessing.get_context("spawn")
#: After how many seconds a worker of these tests says that it waits.
QUIET = 0.05


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


class Said(logging.Handler):
    """Calls a function when a worker logs that it has staged a version and waits."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


def work(address: Address, line: Connection) -> None:
    """Receive for ever, and report the versions, and that a version is staged."""
    staging._QUIET = QUIET
    log = logging.getLogger("sync_core")
    log.addHandler(Said(line.send))
    log.propagate = False
    with Receiver(address, weights()) as receiver:
        line.send("ready")
        while True:
            version = receiver.receive(30.0)
            if version is not None:
                line.send(version)


def train(scheme: TwoPhase, line: Connection, timeout: float) -> None:
    """Send a version to two workers when asked to, and report the outcome."""
    model = weights()
    with Sender(scheme, model, num_workers=2, timeout=timeout) as sender:
        line.send([sender.address(i) for i in range(2)])
        while True:
            model["w"].fill_(line.recv())
            with suppress(SendError):
                sender.send()
            line.send({i: status.version for i, status in sender.workers.items()})


def start(function: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Start a process with a pipe, which is its last argument but those given by name."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=function, args=(args[0], theirs, *args[1:]), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def heard(line: Connection, seconds: float = 30.0) -> Any:
    """Return the next message of a process."""
    assert line.poll(seconds), f"the process says nothing within {seconds} s"
    return line.recv()
