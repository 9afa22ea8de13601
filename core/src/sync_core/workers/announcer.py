"""Tells subscribers what happens, in order, in a thread that holds no lock of whoever tells."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_log = logging.getLogger("sync_core")
# How long closing waits for what is still to be told, in seconds.
_PATIENCE = 1.0

Event = TypeVar("Event")


class Announcer(Generic[Event]):
    """Calls every subscriber with every event; a thread is started for the first of them.

    Args:
        name: the thread's.

    Example:
        >>> announcer = Announcer("example")
        >>> unsubscribe = announcer.subscribe(print)
        >>> announcer.announce("hello")
        >>> announcer.close()
        hello
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Event], object]] = []
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def subscribe(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Call ``callback`` with every event from now on; the function returned ends that."""
        # The same function may be subscribed twice, and is then to be removed once at a time.
        entry = _Entry(callback)
        with self._lock:
            self._callbacks.append(entry)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._tell, name=self._name, daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._lock:
                if entry in self._callbacks:
                    self._callbacks.remove(entry)

        return unsubscribe

    @property
    def heard(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._callbacks) and not self._closed

    def announce(self, event: Event) -> None:
        """Tell everybody, soon; may be called with locks held."""
        if self.heard:
            self._events.put(event)

    def close(self) -> None:
        """Tell what has been announced, and nothing more."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._events.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _tell(self) -> None:
        while (event := self._events.get()) is not None:
            for callback in tuple(self._callbacks):
                try:
                    callback(event)
                except Exception:
                    _log.exception("a subscriber raised when it was told of %r", event)


class _Entry(Generic[Event]):
    def __init__(self, callback: Callable[[Event], object]) -> None:
        self._callback = callback

    def __call__(self, event: Event) -> None:
        self._callback(event)
