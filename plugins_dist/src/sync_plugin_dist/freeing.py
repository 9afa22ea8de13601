"""Frees process groups, which wait for their threads then: not while the process ends.

A thread of Python's that waits while the process ends is ended there, in a destructor, and so by an
abort. What is not freed by then never is.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

# How often it is looked whether the collectives of a group have ended, in seconds.
_LOOKING = 0.1
# How long the end of the process waits for a group that is being freed, in seconds.
_PATIENCE = 5.0


class _Process:
    """Whether groups may be freed in this process, and who is at it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        # Reentrant, as the garbage collector may end a forgotten sender meanwhile.
        self.freeing = threading.RLock()
        self.ends = False

    def end(self) -> None:
        free_now = self.freeing.acquire(timeout=_PATIENCE)
        self.ends = True
        if free_now:
            self.freeing.release()


_process = _Process()
atexit.register(_process.end)
os.register_at_fork(after_in_child=_process.begin)


def free(held: list[Any]) -> None:
    """Free a group and its works.

    Args:
        held: the group, then its works: the only references to them, which are taken out.
    """
    with _process.freeing:
        if _process.ends:
            keep_for_ever(held)
        held.clear()


def free_when_completed(held: list[Any]) -> None:
    """Free a group when its collectives have ended, which may be at their timeout; see `free`."""
    if _completed(held):
        free(held)
        return
    thread = threading.Thread(target=_free_later, args=(held,), name="sync-dist-leave", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Since Python 3.12, no thread begins while the process ends.
        keep_for_ever(held)


def keep_for_ever(held: Iterable[Any]) -> None:
    """Never free these."""
    for each in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _free_later(held: list[Any]) -> None:
    while not _completed(held):
        time.sleep(_LOOKING)
    free(held)


def _completed(held: Sequence[Any]) -> bool:
    return all(work.is_completed() for work in held[1:])
