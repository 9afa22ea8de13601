"""The calls of one worker that have no outcome yet, oldest first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sync_core import RemoteCallError, WorkerLostError
from sync_plugin_std._outcome import Outcome, Returned


class PendingCalls:
    """Futures that end in the order of the calls, or all at once when the worker is lost.

    Args:
        worker_id: the worker that the errors name.
    """

    def __init__(self, worker_id: int) -> None:
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._calls: deque[tuple[str, Future[Any]]] = deque()
        self._lost: str | None = None

    def add(self, name: str, post: Callable[[], None]) -> Future[Any]:
        """A future for a call of ``name``, which ``post`` hands to the worker without blocking."""
        future: Future[Any] = Future()
        # Once posted, a call cannot be taken back: cancel() is to answer False.
        future.set_running_or_notify_cancel()
        # One lock around both, so that outcomes come back in the order of the futures.
        with self._lock:
            lost = self._lost
            if lost is None:
                self._calls.append((name, future))
                post()
        if lost is not None:
            message = f"{lost}, so it cannot run {name}; restart({self._worker_id}) replaces it"
            future.set_exception(WorkerLostError(self._worker_id, message))
        return future

    def finish(self, outcome: Outcome) -> None:
        """End the oldest call, unless the worker was given up for lost in the meantime."""
        with self._lock:
            if not self._calls:
                return
            name, future = self._calls.popleft()
        settle(future, self._worker_id, name, outcome)

    def lose(self, reason: str, *, running: bool) -> None:
        """Fail every call, and each one that is added from now on.

        Args:
            reason: what became of the worker: ``killed by SIGKILL``.
            running: whether that was in the middle of the oldest call.
        """
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            calls, self._calls = self._calls, deque()
        moment = "while running" if running else "before it could run"
        for name, future in calls:
            future.set_exception(WorkerLostError(self._worker_id, f"{reason} {moment} {name}"))
            moment = "before it could run"


def settle(future: Future[Any], worker_id: int, name: str, outcome: Outcome) -> None:
    """End the future of a call of ``name`` with its outcome."""
    if isinstance(outcome, Returned):
        future.set_result(outcome.value)
        return
    message = f"{name} {outcome.verdict}\n{outcome.traceback}".rstrip()
    error = RemoteCallError(worker_id, message)
    if isinstance(outcome.cause, BaseException):
        error.__cause__ = outcome.cause
    future.set_exception(error)
