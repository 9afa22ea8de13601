"""The workers of a collector: starts, calls, replaces and removes them."""

from __future__ import annotations

import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from tensordict import TensorDictBase

from sync_collector.collector_worker import CollectorWorker, WorkerSpec, new_worker
from sync_collector.options import count_workers, factories
from sync_collector.policies import policy_errors
from sync_core import (
    OptionError,
    SendError,
    SendReport,
    UnknownWorkerError,
    WorkerError,
    WorkerGroup,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_plugin_std.workers import gather

_log = logging.getLogger("sync_core")

Result = TypeVar("Result")
Sent = TypeVar("Sent")
OnWorkerFailure = Literal["raise", "restart", "drop", "quarantine"]

# A worker that has died this often before its first batch is not replaced again.
_IN_A_ROW = 3
# The longest quarantine, in timeouts: a silent worker costs at most a sixteenth of the time.
_LONGEST_QUARANTINE = 16


class FailedBatchesError(Exception):
    """Failed batches, raised while a lock is held that replacing workers takes.

    Args:
        failures: the error of each worker.
    """

    def __init__(self, failures: Sequence[WorkerError]) -> None:
        super().__init__(", ".join(map(str, failures)))
        self.failures = failures


@dataclass(slots=True, eq=False)
class PoolWorker:
    """The driver's record of one worker.

    Args:
        worker_id: its id, never reused, except by a worker that replaces it.
        changes: the differences from the specs of the first workers.
        frames: the number of frames in its batch.
        has_joined: whether it is ready and counts among the workers.
        is_restarting: whether it is being replaced. Only the thread that replaces it calls the new
            worker before that has joined.
        is_removed: whether it was removed or is being removed.
        refusal: why it cannot be called; empty if it can.
        joins: the number of workers that have joined under this id.
        lost_in_a_row: how often it was replaced since the last batch.
        commits_at_rest: whether it commits weights that arrive between its batches on its own.
        batch: the requested batch that was not taken yet; None if there is none.
        number: the number of its next batch request.
        holders: the number of callers that block its next batch.
        is_postponed: whether a batch was requested while it was blocked.
        required: the versions that its next batch requires, by model.
        batches: the number of batches since its last weights.
        is_due: whether automatic updates block it.
        random_frames: the frames of random actions in its last request.
        asked_at: the time of its last batch request (`time.monotonic`).
        failures: the number of failures since its last batch, in quarantine.
        retry_at: the time at which its quarantine ends.
    """

    worker_id: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    frames: int = 0
    has_joined: bool = False
    is_restarting: bool = False
    is_removed: bool = False
    refusal: str = ""
    joins: int = 0
    lost_in_a_row: int = 0
    commits_at_rest: bool = False
    batch: Future[TensorDictBase | None] | None = None
    number: int = 0
    holders: int = 0
    is_postponed: bool = False
    required: Mapping[str, int] = field(default_factory=dict)
    batches: int = 0
    is_due: bool = False
    random_frames: int | None = None
    asked_at: float = 0.0
    failures: int = 0
    retry_at: float = 0.0

    @property
    def is_quarantined(self) -> bool:
        """Return whether the worker is in quarantine: nothing waits for it."""
        return time.monotonic() < self.retry_at


class WorkerPool:
    """Starts, builds, calls and replaces the workers of a collector.

    Args:
        group_class: the class of the worker group.
        make_spec: returns the spec for a worker id and a seat.
        num_workers: the initial number of workers; their ids are ``0 … num_workers - 1``.
        timeout: deadline of starting, building and stopping workers, in seconds.
        worker_options: options of the group.
        on_worker_failure: the reaction to workers that fail; see `Collector`.

    Raises:
        RemoteCallError: an environment or a policy could not be made; the message has the
            traceback. All workers were stopped.
        PolicyError: the policy's arguments do not fit the environment.
        WorkerError: a worker did not start.
    """

    def __init__(
        self,
        group_class: type[WorkerGroup],
        make_spec: Callable[[int, int], WorkerSpec],
        num_workers: int,
        timeout: float,
        *,
        worker_options: Mapping[str, Any] | None = None,
        on_worker_failure: OnWorkerFailure = "raise",
    ) -> None:
        self._make_spec = make_spec
        self._timeout = timeout
        #: What to do about workers that fail.
        self.on_worker_failure = on_worker_failure
        #: The next worker's seat; each seat is used once.
        self.next_seat = 0
        #: Each worker by its id, including removed ones.
        self.workers: dict[int, PoolWorker] = {}
        #: Held while weights are sent to workers, and while a worker joins or leaves, so that a
        #: worker exists while it is sent weights. Calls under the lock are limited by the timeout.
        self.lock = threading.RLock()
        # Held while a worker is replaced.
        self._replacing = threading.Lock()
        #: Whether all workers were stopped because no work is left.
        self.dismissed = False
        #: Called with the id of every worker that is added or restarted, after it is built.
        self.on_join: list[Callable[[int], None]] = []
        #: Called with the id of every worker before it is removed.
        self.on_leave: list[Callable[[int], None]] = []
        self._group = group_class(
            new_worker, num_workers, timeout=timeout, **(worker_options or {})
        )
        self.workers = {i: PoolWorker(i) for i in self._group.worker_ids}
        try:
            self._build(self.workers.values())
        except BaseException:
            self._group.stop()
            raise
        for worker in self.workers.values():
            worker.has_joined = True

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        return tuple(worker.worker_id for worker in self.joined)

    @property
    def joined(self) -> tuple[PoolWorker, ...]:
        """The workers, in the order of their ids."""
        if self.dismissed:
            return ()
        return tuple(worker for worker in self.workers.values() if worker.has_joined)

    @property
    def frames(self) -> tuple[int, ...]:
        """The number of frames in each worker's batch, also after the workers were dismissed."""
        return tuple(worker.frames for worker in self.workers.values() if worker.has_joined)

    @property
    def parallel(self) -> bool:
        """Return whether workers run in parallel, and without the driver."""
        return "parallel" in self._group.capabilities

    @property
    def quarantines(self) -> bool:
        """Return whether workers that fail are quarantined."""
        return self.on_worker_failure == "quarantine"

    def waits_for(self, worker_id: int) -> bool:
        """Return whether a worker is not in quarantine."""
        return not self.workers[worker_id].is_quarantined

    def alive(self, worker_id: int) -> bool:
        """Return whether a worker can still be called."""
        try:
            return not self.workers[worker_id].refusal and self._group.alive(worker_id)
        except UnknownWorkerError:
            return False

    def removed(self, worker_id: int) -> bool:
        """Return whether a worker was removed or is being removed."""
        return self.workers[worker_id].is_removed

    def call(
        self, worker_id: int, function: Callable[..., Result], /, *args: Any
    ) -> Future[Result]:
        """Run ``function(host, *args)`` on a worker; see `WorkerGroup.call`."""
        if refusal := self.workers[worker_id].refusal:
            return _refused(worker_id, refusal)
        try:
            return self._group.call(worker_id, function, *args)
        except UnknownWorkerError:
            return _refused(worker_id, "was removed")

    def request(
        self, worker_id: int, function: Callable[..., Result], /, *args: Any
    ) -> Future[Result]:
        """Like `call`, but a worker that is being replaced counts as lost until it has joined."""
        if self.workers[worker_id].is_restarting:
            return _refused(worker_id, "is being replaced")
        return self.call(worker_id, function, *args)

    def call_all(self, function: Callable[..., Result], /, *args: Any) -> dict[int, Future[Result]]:
        """Call a function on every worker at once."""
        return {worker_id: self.request(worker_id, function, *args) for worker_id in self.ids}

    def gather_all(self, what: str, function: Callable[..., Result], /, *args: Any) -> list[Result]:
        """Return the results of a call of every worker, in the order of their ids.

        Args:
            what: a description of the call, for error messages.
            function: see `call`.
            *args: see `call`.

        Raises:
            WorkerError: a worker failed, or was not ready in time.
        """
        return gather(self.call_all(function, *args), self._timeout, what)

    def gather_one(
        self,
        worker_id: int,
        what: str,
        function: Callable[..., Result],
        /,
        *args: Any,
        joins: bool = False,
    ) -> Result:
        """Return the result of a call of one worker; see `gather_all`.

        Args:
            worker_id: the worker.
            what: a description of the call, for error messages.
            function: see `call`.
            *args: see `call`.
            joins: whether the worker may still be joining.
        """
        call = self.call if joins else self.request
        future = call(worker_id, function, *args)
        result: Result = gather({worker_id: future}, self._timeout, what)[0]
        return result

    def add(self, group_options: Mapping[str, Any] | None = None, **changes: Any) -> int:
        """Start and build one more worker; return its id, never used before.

        Args:
            group_options: options for the group's ``add``.
            **changes: fields of its `WorkerSpec` to replace.

        Raises the errors of the constructor, and `OptionError` if the group's ``add`` has no such
        option. After an error the pool is unchanged.
        """
        options = group_options or {}
        for name in options.keys() - inspect.signature(self._group.add).parameters.keys():
            raise OptionError(
                f"{type(self._group).__name__} has no {name!r} for a worker that is added; "
                "leave it out, or use workers='ray'"
            )
        worker_id = self._group.add(**options)
        worker = PoolWorker(worker_id, changes)
        # A new mapping, since other threads iterate over the old one.
        self.workers = {**self.workers, worker_id: worker}
        try:
            self._join(worker)
        except BaseException:
            self.remove(worker_id)
            raise
        return worker_id

    def add_workers(self, num_workers: int | None, create_env_fn: Any) -> tuple[int, ...]:
        """Start workers, which may have other environments than the first ones."""
        num_workers = count_workers(num_workers, create_env_fn)
        if create_env_fn is None:
            return tuple(self.add() for _ in range(num_workers))
        env_fns = factories(create_env_fn, num_workers, "create_env_fn")
        return tuple(self.add(env_fn=env_fn) for env_fn in env_fns)

    def restart(self, worker_id: int) -> None:
        """Replace a worker, dead or alive, by a new one with the same id.

        A worker that is removed meanwhile is not replaced. Raises the errors of the constructor;
        the worker then fails every call, and counts as dead.
        """
        worker = self.workers[worker_id]
        worker.refusal, worker.is_restarting = "", True
        worker.failures, worker.retry_at = 0, 0.0
        try:
            self._group.restart(worker_id)
            try:
                self._join(worker)
            except BaseException as error:
                worker.refusal = f"took the place of another and could not join: {error}"
                raise
        except Exception:
            # The thread that removes the worker also ends the new one.
            if not worker.is_removed:
                raise
        finally:
            worker.is_restarting = False

    def remove(self, worker_id: int) -> None:
        """Stop one worker; its unfinished calls fail."""
        worker = self.workers[worker_id]
        with self.lock:
            worker.is_removed, worker.has_joined = True, False
            if all(one.is_quarantined for one in self.joined):
                # All remaining workers are in quarantine; wait for them again.
                for one in self.joined:
                    one.retry_at, one.asked_at = 0.0, time.monotonic()
            for callback in self.on_leave:
                callback(worker_id)
        self._group.remove(worker_id)
        worker.changes, worker.refusal = {}, ""

    def dismiss(self) -> None:
        """Stop all workers; later calls to all workers reach none."""
        self.dismissed = True
        self._group.stop()

    def stop(self, timeout: float | None = None) -> None:
        """Stop all workers; see `WorkerGroup.stop`."""
        self._group.stop(timeout)

    def take_seat(self) -> int:
        """Return an unused seat."""
        self.next_seat += 1
        return self.next_seat - 1

    def remedy(self, failure: WorkerError, joins: int | None = None) -> None:
        """Restart, remove or quarantine a worker that has failed, dead or alive.

        Args:
            failure: the error.
            joins: the number of workers that had joined under its id at the failure; a worker that
                joined later has not failed. None if the worker has just failed.

        Raises:
            WorkerError: the failure, if ``on_worker_failure`` is ``"raise"`` or no other worker
                could work; or replacements of a worker die repeatedly.
            RemoteCallError: the environment or policy of the new worker could not be made.
        """
        worker = self.workers[failure.worker_id]
        if self.on_worker_failure == "raise":
            raise failure
        if worker.is_removed:
            return
        if self.on_worker_failure == "restart":
            self._replace(worker, failure, joins)
            return
        others = [one for one in self.joined if one is not worker and not one.is_quarantined]
        if not others:
            raise failure
        if self.quarantines and self.alive(worker.worker_id):
            timeouts = min(2**worker.failures, _LONGEST_QUARANTINE)
            worker.failures += 1
            worker.retry_at = time.monotonic() + timeouts * self._timeout
            _log.warning("worker in quarantine for %g s: %s", timeouts * self._timeout, failure)
            return
        _log.warning("worker removed: %s", failure)
        self.remove(worker.worker_id)

    def _replace(self, worker: PoolWorker, failure: WorkerError, joins: int | None) -> None:
        """Replace a worker; the new one has the newest weights when this returns."""
        with self._replacing:
            # Another thread may have replaced a dead worker; a live worker has failed.
            fails = not isinstance(failure, WorkerLostError) and joins in (None, worker.joins)
            while (fails or not self.alive(worker.worker_id)) and not worker.is_removed:
                fails = False
                worker.lost_in_a_row += 1
                if worker.lost_in_a_row > _IN_A_ROW:
                    died = "died" if isinstance(failure, WorkerLostError) else "failed"
                    raise WorkerLostError(
                        worker.worker_id,
                        f"{died}, and so did the {_IN_A_ROW} that took its place one after the "
                        "other, before any of them had made a batch; the last one "
                        f"{failure.message}",
                    ) from failure
                _log.warning("worker replaced: %s", failure)
                try:
                    self.restart(worker.worker_id)
                except WorkerLostError as error:
                    failure = error

    def repeat(self, function: Callable[[], Result]) -> Result:
        """Call a function that uses all workers; if one dies, remedy it and call again.

        Raises the errors of `remedy`.
        """
        for worker_id in self.ids:
            if not self.alive(worker_id):
                self.remedy(WorkerLostError(worker_id, "died"))
        while True:
            try:
                return function()
            except WorkerLostError as lost:
                self.remedy(lost)
            except FailedBatchesError as failed:
                for failure in failed.failures:
                    self.remedy(failure)

    def see_through(self, update: Callable[[], Sent]) -> Sent | SendReport:
        """Send weights, and remedy workers that died or do not acknowledge.

        Returns:
            The update's result; or the report, in which replaced workers have the version.

        Raises:
            SendError: a worker refused the weights, or ``on_worker_failure`` is ``"raise"``.
            WorkerLostError: a worker cannot be connected to a sender.
        """
        while True:
            # Under the lock: a worker that joins afterwards has the newest weights.
            with self.lock:
                joins = {i: worker.joins for i, worker in self.workers.items()}
                try:
                    return update()
                except (SendError, WorkerLostError) as error:
                    failure = error
            if isinstance(failure, SendError):
                return self._make_up_for(failure, joins)
            if not self._has_died(failure.worker_id, failure, joins):
                raise failure
            self.remedy(failure)

    def _make_up_for(self, error: SendError, joins: Mapping[int, int]) -> SendReport:
        if self.on_worker_failure == "raise":
            raise error
        failures: list[WorkerError] = []
        for worker_id, result in error.report.failed.items():
            if self._has_died(worker_id, result.error, joins):
                failures.append(WorkerLostError(worker_id, "died"))
            elif isinstance(result.error, WorkerTimeoutError):
                failures.append(result.error)
            else:
                # The worker refused the weights; a new one would refuse them too.
                raise error
        results = dict(error.report.workers)
        for failure in failures:
            worker_id = failure.worker_id
            try:
                self.remedy(failure, joins[worker_id])
            except WorkerError as unsolved:
                raise error from (None if unsolved is failure else unsolved)
            if self.removed(worker_id):
                del results[worker_id]
            elif self.quarantines:
                results[worker_id] = replace(results[worker_id], remedy="quarantine")
            else:
                version = error.report.version
                results[worker_id] = replace(results[worker_id], version=version, error=None)
        return replace(error.report, workers=results)

    def _has_died(self, worker_id: int, error: Exception | None, joins: Mapping[int, int]) -> bool:
        """Return whether a worker has died; a sender may notice that before its group does.

        Args:
            worker_id: the worker.
            error: its error.
            joins: the number of workers that had joined under each id when the send began.
        """
        if isinstance(error, WorkerLostError) and self.alive(worker_id):
            # The group fails a dead worker's call once it notices the death, which takes Ray
            # seconds.
            wait([self.call(worker_id, _is_there)], self._timeout)
        worker = self.workers[worker_id]
        return not self.alive(worker_id) or worker.is_restarting or worker.joins != joins[worker_id]

    def _join(self, worker: PoolWorker) -> None:
        self._build([worker])
        with self.lock:
            if worker.is_removed:
                return
            for callback in self.on_join:
                callback(worker.worker_id)
            worker.has_joined, worker.is_restarting = True, False
            worker.joins += 1

    def _build(self, workers: Iterable[PoolWorker]) -> None:
        calls: dict[int, Future[int]] = {}
        for worker in workers:
            spec = self._make_spec(worker.worker_id, self.take_seat())
            spec = replace(spec, **worker.changes)
            calls[worker.worker_id] = self._group.call(
                worker.worker_id, CollectorWorker.build, spec
            )
        with policy_errors():
            made = gather(calls, self._timeout, "make its environment and policy")
        for worker_id, frames in zip(calls, made, strict=True):
            self.workers[worker_id].frames = frames


def _is_there(_: CollectorWorker) -> None:
    """Do nothing; a call of it shows whether a worker is alive."""


def _refused(worker_id: int, reason: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(WorkerLostError(worker_id, reason))
    return future


def warn_if_rounded(pool: WorkerPool, frames: int) -> None:
    """Warn if workers make more frames per batch than requested."""
    for worker in pool.joined:
        if worker.frames != frames:
            warnings.warn(
                f"worker {worker.worker_id} makes batches of {worker.frames} frames instead of "
                f"{frames}, a multiple of the number of environments that it steps together",
                stacklevel=4,
            )
