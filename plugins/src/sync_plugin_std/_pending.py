"""The calls of one worker that have no outcome yet, oldest first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from sync_core import CallOutcome, RemoteCall


class PendingCalls:
    """Calls that end in the order in which they come, or all at once when the worker is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[RemoteCall] = deque()
        self._lost: str | None = None

    def add(self, call: RemoteCall, post: Callable[[], None]) -> None:
        """A call, which ``post`` hands to the worker without blocking."""
        # One lock around both, so that outcomes come back in the order of the calls.
        with self._lock:
            lost = self._lost
            if lost is None:
                self._calls.append(call)
                post()
        if lost is not None:
            advice = (
                f"restart({call.worker_id}) of its group replaces it, and so does a Collector with "
                "on_worker_failure='restart'"
            )
            call.lose(f"{lost}, so it cannot run {call.name}; {advice}")

    def finish(self, outcome: CallOutcome) -> None:
        """End the oldest call, unless the worker was given up for lost in the meantime."""
        with self._lock:
            if not self._calls:
                return
            call = self._calls.popleft()
        call.finish(outcome)

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
        for call in calls:
            call.lose(f"{reason} {moment} {call.name}")
            moment = "before it could run"
