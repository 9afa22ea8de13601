"""What this machine gives to a process: shared memory, descriptors, cores."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sync_core.plugins.finding import Finding

_MIB = 1 << 20
_SHARED = Path("/dev/shm")  # noqa: S108  # it is looked at, and not written to
# What Docker gives to a container, and too little for the tensors of a batch.
_DOCKER = 64 * _MIB
_NEARLY_FULL = 0.05
# A worker costs a sender one or two, and a Ray or an RPC worker tens.
_FEW_DESCRIPTORS, _ENOUGH_DESCRIPTORS = 1024, 4096


def find() -> Iterator[Finding]:
    """All of it."""
    with suppress(FileNotFoundError):  # only Linux has it
        usage = shutil.disk_usage(_SHARED)
        yield from shared_memory(usage.total, usage.free)
    yield from descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from threads(os.environ.get("OMP_NUM_THREADS", ""), _cores())


def shared_memory(total: int, free: int) -> Iterator[Finding]:
    """Shared memory that is too small or nearly full.

    Args:
        total: bytes that it can hold.
        free: bytes of that which are free.
    """
    where = str(_SHARED)
    if total <= _DOCKER:
        yield Finding(
            where,
            f"holds {total // _MIB} MiB in all, too little for the tensors that processes share",
            "in a container, type: docker run --shm-size=8g …; elsewhere, as root: "
            f"mount -o remount,size=8G {where}",
        )
    elif free < _NEARLY_FULL * total:
        yield Finding(
            where,
            f"is nearly full: {free // _MIB} of {total // _MIB} MiB are free",
            f"see what is left over there, and remove what nobody uses: ls -lS {where}",
        )


def descriptors(soft: int, hard: int) -> Iterator[Finding]:
    """A low limit on open files, sockets and pipes.

    Args:
        soft: the limit in force.
        hard: the limit up to which a user may raise that.
    """
    if soft == resource.RLIM_INFINITY or soft >= _FEW_DESCRIPTORS:
        return
    remedy = "type: ulimit -n 4096"
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_DESCRIPTORS:
        remedy = f"the hard limit is {hard}, so root has to raise it: ulimit -Hn 4096"
    yield Finding(
        "ulimit -n",
        f"a process may open {soft} files and sockets, few where there are many workers",
        remedy,
    )


def threads(wanted: str, cores: int) -> Iterator[Finding]:
    """A number of threads that does not fit the cores.

    Where it is not set, torch takes as many as there are cores, and worker groups share them out.

    Args:
        wanted: what ``OMP_NUM_THREADS`` is set to; it may be a list, of which the first counts.
        cores: the cores that this process may use.
    """
    about = f"OMP_NUM_THREADS={wanted}"
    first = wanted.partition(",")[0].strip()
    if not first:
        return
    if not first.isdecimal() or int(first) == 0:
        yield Finding(about, "is no number of threads", "type: unset OMP_NUM_THREADS")
    elif int(first) > cores:
        yield Finding(
            about,
            f"is more than the {cores} cores that this process may use, and each process starts "
            "so many threads",
            "type: unset OMP_NUM_THREADS",
        )
    elif int(first) == 1 < cores:
        yield Finding(
            about,
            f"the trainer computes and copies with one of {cores} cores, as torchrun sets it "
            "where nobody else did",
            f"type: export OMP_NUM_THREADS={cores}, divided by the trainers on this machine",
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if _SHARED.exists() else os.cpu_count() or 1
