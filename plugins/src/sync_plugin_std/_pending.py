"""The calls of one worker that have no outcome yet, by number, oldest first."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from sync_core import CallOutcome, RemoteCall


class PendingCalls:
    """Calls that end in the order in which they come, or all at once when the worker is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, RemoteCall] = {}
        self._lost: str | None = None

    def add(self, call: RemoteCall, post: Callable[[int], None]) -> None:
        """A call, which ``post`` hands to the worker by its number and without blocking."""
        # One lock around both, so that outcomes come back in the order of the calls.
        with self._lock:
            lost = self._lost
            if lost is None:
                number = next(self._numbers)
                self._calls[number] = call
                post(number)
        if lost is not None:
            advice = (
                f"restart({call.worker_id}) of its group replaces it, and so does a Collector with "
                "on_worker_failure='restart'"
            )
            call.lose(f"{lost}, so it cannot run {call.name}; {advice}")

    def finish(self, number: int, outcome: CallOutcome) -> None:
        """End a call, unless the worker was given up for lost in the meantime."""
        with self._lock:
            call = self._calls.get(number)
            # Ctrl-C kept those before it from the worker.
            self._calls = {later: each for later, each in self._calls.items() if later > number}
        if call is not None:
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
            calls, self._calls = self._calls, {}
        moment = "while running" if running else "before it could run"
        for call in calls.values():
            call.lose(f"{reason} {moment} {call.name}")
            moment = "before it could run"
