"""What happens when a worker dies: an error, or another in its place."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Literal

from sync_core.collector.crew import Crew
from sync_core.errors import SendError, WorkerLostError
from sync_core.report import SendReport

OnWorkerFailure = Literal["raise", "restart"]

# A worker that dies again and again before it has made one batch will not do better.
_IN_A_ROW = 3
# How long a group may take to notice that a worker has died, in seconds.
_NOTICE = 2.0


class Replacement:
    """Replaces the workers that have died, if they are to be replaced.

    Args:
        crew: the workers.
        on_worker_failure: ``"restart"`` to replace them.
    """

    def __init__(self, crew: Crew, on_worker_failure: OnWorkerFailure) -> None:
        self._crew = crew
        self._restarts = on_worker_failure == "restart"
        self._in_a_row: Counter[int] = Counter()
        self._lock = threading.Lock()

    def replace(self, lost: WorkerLostError) -> None:
        """Put another worker in the place of one; it has the newest weights when this returns.

        Raises:
            WorkerLostError: workers are not to be replaced, or this one's place is lost again
                and again.
            RemoteCallError: the other worker's environment or policy could not be made.
        """
        worker_id = lost.worker_id
        if not self._restarts:
            raise lost
        with self._lock:
            if self._crew.alive(worker_id) or self._crew.removed(worker_id):
                return
            self._in_a_row[worker_id] += 1
            if self._in_a_row[worker_id] > _IN_A_ROW:
                raise WorkerLostError(
                    worker_id,
                    f"died, and so did the {_IN_A_ROW} that took its place one after the other, "
                    f"before any of them had made a batch; the last one {lost.message}",
                ) from lost
            self._crew.restart(worker_id)

    def replace_dead(self) -> None:
        """Replace every worker that has died; raises as `replace` does."""
        for worker_id in self._crew.ids:
            if not self._crew.alive(worker_id):
                self.replace(WorkerLostError(worker_id, "died"))

    def make_up_for(self, error: SendError) -> SendReport:
        """Replace the workers that did not get weights because they have died.

        Returns:
            The report: the new ones have the version.

        Raises:
            SendError: others did not get them either, or the dead are not replaced.
        """
        failed = error.report.failed
        if not self._restarts or not all(self._has_died(i, r.error) for i, r in failed.items()):
            raise error
        results = dict(error.report.workers)
        for worker_id in failed:
            self.replace(WorkerLostError(worker_id, "died"))
            result = results.pop(worker_id)
            if not self._crew.removed(worker_id):
                version = error.report.version
                results[worker_id] = replace(result, version=version, error=None)
        return replace(error.report, workers=results)

    def _has_died(self, worker_id: int, error: Exception | None) -> bool:
        """Whether a worker is dead; who talks to it may notice that before its group does."""
        deadline = time.monotonic() + (_NOTICE if isinstance(error, WorkerLostError) else 0.0)
        while self._crew.alive(worker_id) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._crew.alive(worker_id)

    def delivered(self, worker_id: int) -> None:
        """A worker has made a batch."""
        self._in_a_row.pop(worker_id, None)
