"""A timer whose action finds everything as it was when the timer rang, under a lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class LockedTimer:
    """At most one action at a time waits for its moment.

    Args:
        lock: held during every call, and during the action.
        seconds: how long an action waits.
    """

    def __init__(self, lock: AbstractContextManager[Any], seconds: float) -> None:
        self._lock = lock
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    @property
    def running(self) -> bool:
        """Whether an action waits."""
        return self._timer is not None

    def start(self, action: Callable[[], None]) -> None:
        """Do something later."""
        timer = threading.Timer(self._seconds, lambda: self._ring(timer, action))
        timer.daemon = True
        self._timer = timer
        timer.start()

    def stop(self) -> None:
        """Do nothing, then; not even if the moment has come, and the lock is waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self, timer: threading.Timer, action: Callable[[], None]) -> None:
        with self._lock:
            if self._timer is timer:
                self._timer = None
                action()
