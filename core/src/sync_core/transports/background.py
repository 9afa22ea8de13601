"""Receives in its own thread, so that a version has come already when it is asked for."""

from __future__ import annotations

import threading

from sync_core.transports.transport import Answer, ReceiverTransport
from sync_core.weights.payload import Payload

# How long the thread may take to notice that it is to end, in seconds.
_TICK = 0.1
# How long closing waits for a transport that has begun to receive and does not come back.
_PATIENCE = 2.0


class BackgroundReceiver(ReceiverTransport):
    """Stages the newest version; the thread that calls `receive` commits it.

    Args:
        transport: what receives; owned from now on.
    """

    def __init__(self, transport: ReceiverTransport) -> None:
        self._transport = transport
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._staged: Payload | None = None
        self._failure: Exception | None = None
        self._woken = False
        self._closed = False
        self._thread = threading.Thread(target=self._stage, name="sync-receiver", daemon=True)
        self._thread.start()

    def receive(self, timeout: float) -> Payload | None:
        """The version that is staged, or the next one."""
        with self._lock:
            self._changed.wait_for(lambda: self._staged or self._failure or self._woken, timeout)
            payload, self._staged = self._staged, None
            if payload is not None:
                return payload
            failure, self._failure = self._failure, None
            self._changed.notify_all()
        if failure is not None:
            raise failure
        return None

    def acknowledge(self, answer: Answer) -> None:
        """Answer."""
        self._transport.acknowledge(answer)

    def leave(self, reason: str) -> None:
        """Notify the sender."""
        self._transport.leave(reason)

    def wake(self) -> None:
        """Wake waiting threads; one that commits a staged version still answers."""
        with self._lock:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, which closes what receives as soon as that has come back."""
        with self._lock:
            self._woken = self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)

    def _stage(self) -> None:
        try:
            while not self._closed:
                try:
                    payload = self._transport.receive(_TICK)
                except Exception as error:
                    self._fail(error)
                    continue
                if payload is not None:
                    self._replace(payload)
        finally:
            if self._staged is not None:
                self._staged.release()
                self._staged = None
            self._transport.close()

    def _replace(self, payload: Payload) -> None:
        with self._lock:
            replaced, self._staged = self._staged, payload
            self._changed.notify_all()
        if replaced is not None:
            replaced.release()

    def _fail(self, error: Exception) -> None:
        """Let the next `receive` raise it, and continue after that."""
        with self._lock:
            self._failure = error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._failure is None)
