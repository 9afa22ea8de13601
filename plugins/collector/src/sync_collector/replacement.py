"""The replacement of workers that die."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

from sync_collector.worker_pool import WorkerPool
from sync_core import SendError, SendReport, WorkerLostError

Result = TypeVar("Result")
Sent = TypeVar("Sent")
OnWorkerFailure = Literal["raise", "restart"]

# A worker that dies again and again before it has made one batch will not do better.
_IN_A_ROW = 3
# How long a group may take to notice that a worker has died, in seconds.
_NOTICE = 2.0


class Replacement:
    """Replaces the workers that have died, if the collector asks for it.

    Args:
        pool: the workers.
        on_worker_failure: ``"restart"`` to replace them.
    """

    def __init__(self, pool: WorkerPool, on_worker_failure: OnWorkerFailure) -> None:
        self._pool = pool
        self._restarts = on_worker_failure == "restart"
        self._in_a_row: Counter[int] = Counter()
        self._lock = threading.Lock()

    def replace(self, lost: WorkerLostError) -> None:
        """Put another worker in place of one; it has the newest weights when this returns.

        Raises:
            WorkerLostError: workers are not to be replaced, or this one's place is lost again
                and again.
            RemoteCallError: the other worker's environment or policy could not be made.
        """
        worker_id = lost.worker_id
        if not self._restarts:
            raise lost
        with self._lock:
            while not (self._pool.alive(worker_id) or self._pool.removed(worker_id)):
                self._in_a_row[worker_id] += 1
                if self._in_a_row[worker_id] > _IN_A_ROW:
                    raise WorkerLostError(
                        worker_id,
                        f"died, and so did the {_IN_A_ROW} that took its place one after the "
                        "other, before any of them had made a batch; the last one "
                        f"{lost.message}",
                    ) from lost
                try:
                    self._pool.restart(worker_id)
                except WorkerLostError as error:
                    lost = error

    def replace_dead(self) -> None:
        """Replace every worker that has died; raises as `replace` does."""
        for worker_id in self._pool.ids:
            if not self._pool.alive(worker_id):
                self.replace(WorkerLostError(worker_id, "died"))

    def repeat(self, function: Callable[[], Result]) -> Result:
        """Do something with all workers; again, if one has died in it and was replaced.

        Raises as `replace` does.
        """
        while True:
            try:
                return function()
            except WorkerLostError as lost:
                self.replace(lost)

    def see_through(self, update: Callable[[], Sent]) -> Sent | SendReport:
        """Send weights, and replace the workers that do not get them because they have died.

        Returns:
            Return the update's result; or the report: the new workers have the version.

        Raises:
            SendError: others did not get them either, or the dead are not replaced.
            WorkerLostError: one cannot be connected to a sender, and is not replaced.
        """
        while True:
            # No worker joins between these two lines: one that joined since then has the newest.
            with self._pool.lock:
                joins = self._pool.joins.copy()
                try:
                    return update()
                except (SendError, WorkerLostError) as error:
                    failure = error
            if isinstance(failure, SendError):
                return self._make_up_for(failure, joins)
            if not self._has_died(failure.worker_id, failure, joins):
                raise failure
            self.replace(failure)

    def _make_up_for(self, error: SendError, joins: Counter[int]) -> SendReport:
        failed = error.report.failed
        if not self._restarts or not all(
            self._has_died(i, r.error, joins) for i, r in failed.items()
        ):
            raise error
        results = dict(error.report.workers)
        for worker_id in failed:
            self.replace(WorkerLostError(worker_id, "died"))
            if self._pool.removed(worker_id):
                del results[worker_id]
            else:
                version = error.report.version
                results[worker_id] = replace(results[worker_id], version=version, error=None)
        return replace(error.report, workers=results)

    def _has_died(self, worker_id: int, error: Exception | None, joins: Counter[int]) -> bool:
        """Return whether a worker has died; a caller may notice that before its group does.

        Args:
            worker_id: the worker.
            error: what it failed with.
            joins: how often a worker had joined under each id: another may have come since.
        """
        deadline = time.monotonic() + (_NOTICE if isinstance(error, WorkerLostError) else 0.0)
        while not (died := self._is_gone(worker_id, joins)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return died

    def _is_gone(self, worker_id: int, joins: Counter[int]) -> bool:
        return (
            not self._pool.alive(worker_id)
            or self._pool.restarting(worker_id)
            or self._pool.joins[worker_id] != joins[worker_id]
        )

    def delivered(self, worker_id: int) -> None:
        """A worker has made a batch."""
        self._in_a_row.pop(worker_id, None)
