"""Readers in tight loops, while a sender publishes as fast as it can: is any look at two versions?

Every parameter is filled with the number of its version. A read is one look at a whole model: a
copy of every byte, which is what it was at the read before, or else a newer version in all places.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from chaos_kit.subjects import Subject
from sync_core import Address, Receiver, Sender, SenderLostError, SendError
from sync_testing.schemes import Worker, borrow_pool

_WORKERS = 2
# Reads between two looks at the clock, and at most between two versions.
_TURN = 500
# Where readers are killed, it is so many at least.
_KILLS = 10


@dataclass(frozen=True, slots=True)
class Reads:
    """The versions that readers have seen.

    Args:
        reads: looks at a whole model.
        torn: those at which there were two versions.
        backwards: those at which the version was older than before.
        versions: commits.
        killed: readers that were killed, and replaced.
    """

    reads: int = 0
    torn: int = 0
    backwards: int = 0
    versions: int = 0
    killed: int = 0

    def __add__(self, other: Reads) -> Reads:
        return Reads(
            self.reads + other.reads,
            self.torn + other.torn,
            self.backwards + other.backwards,
            self.versions + other.versions,
            self.killed + other.killed,
        )


def make_model(value: float = 0.0) -> dict[str, Tensor]:
    """16 kB, so that a reader looks at all of it in some microseconds."""
    return {f"tensor{i}": torch.full((size,), value) for i, size in enumerate((1, 2048, 2047))}


def connect(worker: Worker, address: Address) -> int:
    """Make the model and its receiver; the process."""
    if worker.receiver is not None:
        worker.receiver.close()
    worker.model = make_model()
    worker.receiver = Receiver(address, worker.model)
    return os.getpid()


def read(worker: Worker, seconds: float, count: int) -> Reads:
    """Receive and read in turn until the time is over, or so many reads are done."""
    assert worker.receiver is not None
    tensors = list(worker.model.values())
    seen = Reads()
    newest = 0.0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and seen.reads < count:
        try:
            committed = worker.receiver.receive(0.0)
        except SenderLostError:
            break
        torn = backwards = 0
        # A tensor may view other memory after a commit, and only then.
        look_at = [tensor.numpy().tobytes for tensor in tensors]
        known: list[bytes] = []
        for _ in range(_TURN):
            # In one call for each tensor: what a read costs decides how many there can be.
            found = [look() for look in look_at]
            if found == known:
                continue
            values = {value for part in found for value in np.frombuffer(part, np.float32).tolist()}
            torn += int(len(values) > 1)
            backwards += int(min(values) < newest)
            newest = max(values)
            # A torn tensor is torn at the next read too, unless it has changed.
            known = found if len(values) == 1 else []
        seen += Reads(_TURN, torn, backwards, int(committed is not None))
    return seen


def hunt(
    subject: Subject, *, reads: int, zero_copy: bool, kill_every: float | None, seed: int = 0
) -> Reads:
    """Look for torn reads.

    Args:
        subject: the scheme.
        reads: at least so many.
        zero_copy: whether the models view the memory that is written to.
        kill_every: after how many seconds a random reader is killed, ten times at least; None for
            never.
        seed: which.
    """
    total = Reads()
    random_ = random.Random(seed)
    with borrow_pool(subject.group_class) as pool:
        pool.make_ready()
        kills = kill_every if subject.processes else None
        model = make_model()
        with Sender(
            subject.scheme, model, num_workers=_WORKERS, zero_copy=zero_copy, **subject.options
        ) as sender:
            pids = [pool.call(i, connect, sender.address(i)) for i in range(_WORKERS)]
            # Else a short hunt may be over before there is anything to read.
            _publish(sender, model)
            while total.reads < reads or (kills is not None and total.killed < _KILLS):
                seconds = 20.0 if kills is None else kills
                # A reader that will be killed must not have done its share before.
                left = -(-(reads - total.reads) // _WORKERS) if kills is None else sys.maxsize
                calls = [pool.submit(i, read, seconds, left) for i in range(_WORKERS)]
                victim = random_.randrange(_WORKERS) if kills is not None else None
                kill_at = time.monotonic() + seconds / 2
                while not all(call.done() for call in calls):
                    _publish(sender, model)
                    if victim is not None and time.monotonic() > kill_at:
                        os.kill(pids[victim], signal.SIGKILL)
                        calls[victim].exception(30)
                        pool.restart(victim)
                        pids[victim] = pool.call(victim, connect, sender.address(victim))
                        total, victim = replace(total, killed=total.killed + 1), None
                total += _sum([call.result(30) for call in calls if call.exception(30) is None])
    return total


def _publish(sender: Sender, model: dict[str, Tensor]) -> None:
    """Send the next version, and do not wait for present readers."""
    value = float(sender.version + 1)
    for tensor in model.values():
        tensor.fill_(value)
    with suppress(SendError):
        sender.send_async().wait(0.002)


def _sum(parts: Sequence[Reads]) -> Reads:
    return sum(parts, Reads())
