"""One reader of a transport at a time, and one update of a model at a time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sync_core.models.commit import own_memory
from sync_core.models.extract import named_tensors
from sync_core.weights.payload import Payload

# How long closing waits for a thread that loads what it has received, in seconds.
_PATIENCE = 2.0


class Exclusive:
    """What one thread does at a time, and may do again inside that."""

    def __init__(self) -> None:
        #: For ``with``: Ctrl-C inside of methods written in Python would leave it taken.
        self.lock = threading.RLock()
        #: Whether the thread that holds it waits for what may never come.
        self.waiting = False
        _turns.add(self)

    def acquire(self, timeout: float) -> bool:
        """Begin a turn; False where another thread's lasts longer than ``timeout`` seconds."""
        return self.lock.acquire(timeout=min(max(0.0, timeout), threading.TIMEOUT_MAX))

    def release(self) -> None:
        """End a turn."""
        self.lock.release()

    @contextmanager
    def last(self, wake: Callable[[], None]) -> Iterator[None]:
        """Run a ``with`` block after every turn has ended.

        Args:
            wake: ends the wait of the thread that holds the lock.
        """
        alone = self.lock.acquire(blocking=False)
        # Interrupted by a signal, whose handler closes, this thread may wait itself.
        if not alone or self.waiting:
            wake()
        if not alone:
            alone = self.lock.acquire(timeout=_PATIENCE)
        try:
            yield
        finally:
            if alone:
                self.lock.release()


# Those of this process.
_turns: weakref.WeakSet[Exclusive] = weakref.WeakSet()


def _forget_threads() -> None:
    """In a forked process no thread receives, whatever the parent's threads do."""
    for turn in _turns:
        turn.lock, turn.waiting = threading.RLock(), False


os.register_at_fork(after_in_child=_forget_threads)


class Lease:
    """The payload that a model views, and the model; none at first."""

    def __init__(self) -> None:
        self._model: Any = None
        self._payload: Payload | None = None

    def replace(self, model: Any, payload: Payload) -> None:
        """The model views this payload now."""
        if self._payload is not None and model is self._model:
            self._payload.release()
        else:
            self.end()
        self._model, self._payload = model, payload

    def end(self) -> None:
        """Give the model its own memory."""
        if self._payload is not None:
            vacate(self._model, self._payload)
            self._model = self._payload = None


def vacate(model: Any, payload: Payload) -> None:
    """Release a payload, of which the model keeps what it views in its own memory."""
    try:
        own_memory(named_tensors(model), payload.tensors)
    finally:
        payload.release()
