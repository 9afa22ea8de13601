"""A long life: very many sends, and what the processes hold at ten points on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from chaos_kit.subjects import Subject
from chaos_kit.worker import as_module, resources
from sync_core import Receiver, Sender
from sync_testing.schemes import SharedGroup, Worker, borrow_pool

_WORKERS = 2
_POINTS = 10
# A call to a worker is one for several sends, as the call itself is not what is measured.
_TURN = 100
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHM = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Holding:
    """The resources that the trainer and its workers hold."""

    sends: int
    trainer_mb: float
    workers_mb: float
    descriptors: int
    threads: int
    sockets: int
    shm_mb: float


def connect(worker: Worker, address: Any, nbytes: int) -> None:
    """Make a model and its receiver."""
    worker.model = as_module([torch.zeros(nbytes, dtype=torch.uint8)])
    worker.receiver = Receiver(address, worker.model)


def receive(worker: Worker, version: int) -> int:
    """Receive until there is this version."""
    assert worker.receiver is not None
    while worker.receiver.version < version:
        if worker.receiver.receive(60.0) is None:
            raise TimeoutError(f"version {version} did not come")
    return worker.receiver.version


def hold(worker: Worker | None = None) -> dict[str, float]:
    """Return what this process holds."""
    del worker
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    links = [_link(path) for path in Path("/proc/self/fd").iterdir()]
    sockets = sum(link.startswith("socket:") for link in links)
    return {**resources(), "mb": resident / 1e6, "sockets": sockets}


def live(subject: Subject, *, sends: int, nbytes: int) -> Iterator[Holding]:
    """Send very often, and look ten times; the first time when a tenth has been sent.

    Args:
        subject: the scheme.
        sends: how often.
        nbytes: the size of the model.
    """
    with borrow_pool(subject.group_class) as pool:
        pool.make_ready()
        model = as_module([torch.ones(nbytes, dtype=torch.uint8)])
        # A send of so much takes its time on a machine that does something else, too.
        with Sender(
            subject.scheme, model, num_workers=_WORKERS, timeout=60.0, **subject.options
        ) as sender:
            for i in range(_WORKERS):
                pool.call(i, connect, sender.address(i), nbytes)
            for point in range(1, _POINTS + 1):
                _send_until(sender, pool, sends * point // _POINTS)
                yield _look(pool, sender.version)
        pool.make_ready()


def grown(points: list[Holding]) -> Iterator[str]:
    """Return what there is more of at the end than at the third of ten points, and how much."""
    allowed = {"trainer_mb": 40.0, "workers_mb": 80.0, "shm_mb": 16.0}
    for field in fields(Holding):
        first, last = (getattr(points[i], field.name) for i in (2, -1))
        if field.name != "sends" and last > first + allowed.get(field.name, 0):
            yield f"{field.name} grew from {first:g} to {last:g}"


def _send_until(sender: Sender, pool: SharedGroup, version: int) -> None:
    while sender.version < version:
        last = min(version, sender.version + _TURN)
        calls: list[Future[int]] = [
            pool.submit(i, _receive_each, sender.version, last) for i in range(_WORKERS)
        ]
        while sender.version < last:
            sender.send()
        for call in calls:
            call.result(120)


def _receive_each(worker: Worker, first: int, last: int) -> None:
    for version in range(first + 1, last + 1):
        receive(worker, version)


def _look(pool: SharedGroup, sends: int) -> Holding:
    mine = hold()
    theirs = [pool.call(i, hold) for i in range(_WORKERS)]
    used = os.statvfs(_SHM)
    return Holding(
        sends=sends,
        trainer_mb=round(mine["mb"], 1),
        workers_mb=round(sum(each["mb"] for each in theirs), 1),
        descriptors=int(sum(each["descriptors"] for each in (mine, *theirs))),
        threads=int(sum(each["threads"] for each in (mine, *theirs))),
        sockets=int(sum(each["sockets"] for each in (mine, *theirs))),
        shm_mb=round((used.f_blocks - used.f_bfree) * used.f_frsize / 1e6, 1),
    )


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""
