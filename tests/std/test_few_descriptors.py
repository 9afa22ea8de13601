"""A constructor that meets the limit of open files keeps none of those that it has opened."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from torch import nn

from sync_core import Receiver, Sender, SyncError
from sync_plugin_std.workers import ProcessGroup
from sync_testing import eventually

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counted in /proc")

# More than any of them opens.
_MOST = 40


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def _only(spare: int) -> Iterator[None]:
    """Let this process open so many files, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (_open_files() + 2 * _MOST, limits[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in held[len(held) - spare :]:
            os.close(descriptor)
        del held[len(held) - spare :]
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _works(use: Callable[[], None]) -> bool:
    try:
        use()
    except (SyncError, OSError):
        return False
    return True


@pytest.mark.parametrize("scheme", ["shm", "mp", "dist", "chunked::shm"])
def test_senders_and_receivers(scheme: str) -> None:
    def use() -> None:
        with Sender(scheme, nn.Linear(2, 2), num_workers=1, timeout=2.0) as sender:
            Receiver(sender.address(0), nn.Linear(2, 2), timeout=2.0).close()

    use()  # what is made once and kept
    before = _open_files()
    for spare in range(_MOST):
        with _only(spare):
            enough = _works(use)
        assert eventually(lambda: _open_files() <= before, 10.0), f"with {spare} to open"
        if enough:
            break
    else:
        pytest.fail(f"{_MOST} must be enough")


def test_workers() -> None:
    ProcessGroup(lambda _: [], 1).stop()
    before = _open_files()
    for spare in range(_MOST):
        with _only(spare):
            enough = _works(lambda: ProcessGroup(lambda _: [], 1).stop())
        assert eventually(lambda: _open_files() <= before, 10.0), f"with {spare} to open"
        if enough:
            break
    else:
        pytest.fail(f"{_MOST} must be enough")
