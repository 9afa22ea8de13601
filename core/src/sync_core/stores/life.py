"""Signs of life in a store: who gives them, and who judges by them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("sync_core")
#: How many signs there are in the time after which a peer counts as dead.
SIGNS = 10


class Pulse:
    """Calls a function again and again, in a thread.

    Args:
        beat: gives a sign of life.
        seconds: between two calls.
    """

    def __init__(self, beat: Callable[[], object], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sync-store-pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop. Ending again is allowed."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._beat()
            except Exception as error:
                _log.warning("a sign of life failed, and is tried again: %r", error)


class Watch:
    """Tells by the signs of a peer whether it lives, by this process's clock alone.

    Args:
        lost_after: seconds without a sign after which it does not.
    """

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._last: object = None
        self._since = self._looked = time.monotonic()

    def lives(self, sign: object) -> bool:
        """Whether it lives.

        Args:
            sign: the newest; each is another than the one before.
        """
        now = time.monotonic()
        # Whoever has not looked for a while cannot know how long nothing came.
        if sign != self._last or now - self._looked > self._lost_after / 2:
            self._last, self._since = sign, now
        self._looked = now
        return now - self._since <= self._lost_after
