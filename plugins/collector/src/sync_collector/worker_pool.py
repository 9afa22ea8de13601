"""The workers of a collector: how they start, join, are replaced and leave, and calls of them."""

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

# A worker that dies again and again before it has made one batch will not do better.
_IN_A_ROW = 3
# The longest quarantine, in timeouts: a silent worker costs a sixteenth of the time, at most.
_LONGEST_QUARANTINE = 16


class FailedBatchesError(Exception):
    """Batches that cannot be made, found where workers cannot be replaced.

    Args:
        failures: how each worker has failed.
    """

    def __init__(self, failures: Sequence[WorkerError]) -> None:
        super().__init__(", ".join(map(str, failures)))
        self.failures = failures


@dataclass(slots=True, eq=False)
class PoolWorker:
    """The driver's record of one worker.

    Args:
        worker_id: its id, which no other worker ever has; one that replaces it has the same.
        changes: what differs from the specs of the first workers.
        frames: the frames of a batch of its.
        has_joined: whether it is among all workers.
        is_restarting: whether another is being put in its place. Only the thread that does so calls
            that one before it is like the rest.
        is_removed: whether it was removed, or is about to end because of that.
        refusal: why it cannot be called; empty where it can.
        joins: how often a worker has joined under this id.
        lost_in_a_row: how often it was replaced since the last batch.
        commits_at_rest: whether it commits weights that arrive between its batches.
        batch: the batch that it was asked for and that was not taken; None if there is none.
        number: the number of the next batch that it is asked for.
        holders: how many hold it back from its next batch.
        is_postponed: whether it was asked for a batch while it was held back.
        required: the versions that its next batch requires, by model.
        batches: the batches that it has made since it was last sent weights.
        is_due: whether automatic updates hold it back.
        random_frames: the frames of random actions that it was asked for last.
        asked_at: when it was asked for its batch (`time.monotonic`).
        failures: how often it has failed since its last batch, in quarantine.
        retry_at: when it is waited for again, where it is in quarantine.
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
        """Return whether nothing waits for it."""
        return time.monotonic() < self.retry_at


class WorkerPool:
    """Starts workers, builds what they host, calls them, and replaces those that die.

    Args:
        group_class: what workers are.
        make_spec: gives the spec for a worker id and a seat.
        num_workers: how many there are at first; their ids are ``0 … num_workers - 1``.
        timeout: deadline of starting a worker, of building and of stopping, in seconds.
        worker_options: options of the group.
        on_worker_failure: what is done about workers that fail; see `Collector`.

    Raises:
        RemoteCallError: an environment or a policy could not be made; it has the traceback. Every
            worker is stopped first.
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
        #: The policy for workers that fail.
        self.on_worker_failure = on_worker_failure
        #: The number of the next worker's seat; no seat is given twice.
        self.next_seat = 0
        #: Each worker by its id, also those that were removed.
        self.workers: dict[int, PoolWorker] = {}
        #: Held while workers are sent weights, and while one joins or leaves: a worker that is sent
        #: something is there. One change waits for another no longer than calls to workers take.
        self.lock = threading.RLock()
        # One worker is replaced at a time.
        self._replacing = threading.Lock()
        #: Whether all workers were ended because nothing is left to do.
        self.dismissed = False
        #: Called with the id of every worker that is added or restarted, once it is built.
        self.on_join: list[Callable[[int], None]] = []
        #: Called with the id of every worker that is about to be removed.
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
        """The frames of a batch of each worker, also of those that were dismissed."""
        return tuple(worker.frames for worker in self.workers.values() if worker.has_joined)

    @property
    def parallel(self) -> bool:
        """Return whether workers run at once, and without the driver."""
        return "parallel" in self._group.capabilities

    @property
    def quarantines(self) -> bool:
        """Return whether workers that fail are not waited for, for a time."""
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
        """Return whether a worker was removed, or is about to end because of that."""
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
        """The same; but a worker that is being replaced counts as lost, until it has joined."""
        if self.workers[worker_id].is_restarting:
            return _refused(worker_id, "is being replaced")
        return self.call(worker_id, function, *args)

    def call_all(self, function: Callable[..., Result], /, *args: Any) -> dict[int, Future[Result]]:
        """The same on every worker at once."""
        return {worker_id: self.request(worker_id, function, *args) for worker_id in self.ids}

    def gather_all(self, what: str, function: Callable[..., Result], /, *args: Any) -> list[Result]:
        """The results of a call of every worker, in the order of their ids.

        Args:
            what: what the workers do, for the message of an error.
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
        """The result of a call of one worker; see `gather_all`.

        Args:
            worker_id: the worker.
            what: what it does, for the message of an error.
            function: see `call`.
            *args: see `call`.
            joins: whether it may be a worker that is about to replace another.
        """
        call = self.call if joins else self.request
        future = call(worker_id, function, *args)
        result: Result = gather({worker_id: future}, self._timeout, what)[0]
        return result

    def add(self, group_options: Mapping[str, Any] | None = None, **changes: Any) -> int:
        """Start and build one more worker; its id, never used before.

        Args:
            group_options: what the group's ``add`` gets.
            **changes: fields of its `WorkerSpec` that replace those of the spec.

        Raises as the constructor does, and `OptionError` for an option that the group's ``add``
        does not have; the pool is then as before.
        """
        options = group_options or {}
        for name in options.keys() - inspect.signature(self._group.add).parameters.keys():
            raise OptionError(
                f"{type(self._group).__name__} has no {name!r} for a worker that is added; "
                "leave it out, or use workers='ray'"
            )
        worker_id = self._group.add(**options)
        worker = PoolWorker(worker_id, changes)
        # Another mapping, since other threads iterate over this one.
        self.workers = {**self.workers, worker_id: worker}
        try:
            self._join(worker)
        except BaseException:
            self.remove(worker_id)
            raise
        return worker_id

    def add_workers(self, num_workers: int | None, create_env_fn: Any) -> tuple[int, ...]:
        """Start workers that differ from the others by their environments at most."""
        num_workers = count_workers(num_workers, create_env_fn)
        if create_env_fn is None:
            return tuple(self.add() for _ in range(num_workers))
        env_fns = factories(create_env_fn, num_workers, "create_env_fn")
        return tuple(self.add(env_fn=env_fn) for env_fn in env_fns)

    def restart(self, worker_id: int) -> None:
        """Put a new worker in place of one, dead or alive, under the same id.

        One that is removed meanwhile is not replaced.

        Raises as the constructor does; the worker then fails every call, and counts as dead.
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
            # The thread that removes it ends the new one, too.
            if not worker.is_removed:
                raise
        finally:
            worker.is_restarting = False

    def remove(self, worker_id: int) -> None:
        """End one worker; its unfinished calls fail."""
        worker = self.workers[worker_id]
        with self.lock:
            worker.is_removed, worker.has_joined = True, False
            if all(one.is_quarantined for one in self.joined):
                # Nothing else is left to wait for.
                for one in self.joined:
                    one.retry_at, one.asked_at = 0.0, time.monotonic()
            for callback in self.on_leave:
                callback(worker_id)
        self._group.remove(worker_id)
        worker.changes, worker.refusal = {}, ""

    def dismiss(self) -> None:
        """End all workers; calls to all of them reach none from now on."""
        self.dismissed = True
        self._group.stop()

    def stop(self, timeout: float | None = None) -> None:
        """End all workers; see `WorkerGroup.stop`."""
        self._group.stop(timeout)

    def take_seat(self) -> int:
        """A seat that no worker has or had."""
        self.next_seat += 1
        return self.next_seat - 1

    def remedy(self, failure: WorkerError, joins: int | None = None) -> None:
        """Restart, remove or quarantine a worker that has failed, dead or alive.

        Args:
            failure: how it has failed.
            joins: how often a worker had joined under its id by then: one that has joined since
                did not fail. None where it failed just now.

        Raises:
            WorkerError: the failure, where nothing is done about it, or no other worker is left
                that could work; or the place of a worker is lost again and again.
            RemoteCallError: the environment or policy of one that replaces it could not be made.
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
        """Put another worker in place of one; it has the newest weights when this returns."""
        with self._replacing:
            # A dead one may have been replaced by another thread; one that lives has failed.
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
        """Do something with all workers; again, if one has died in it and was replaced or removed.

        Raises as `remedy` does.
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
        """Send weights, and remedy workers that have died or do not answer.

        Returns:
            The update's result; or the report: workers that replace others have the version.

        Raises:
            SendError: others did not get them either, or nothing is done about failures.
            WorkerLostError: one cannot be connected to a sender, and nothing is done about it.
        """
        while True:
            # No worker joins between these two lines: one that joined since then has the newest.
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
                # It refused the weights, as another one would.
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
            error: what it failed with.
            joins: how often a worker had joined under each id: another may have come since.
        """
        if isinstance(error, WorkerLostError) and self.alive(worker_id):
            # The group ends a call of a dead worker once it notices that. Ray may take seconds.
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
    """Do nothing, in a worker."""


def _refused(worker_id: int, reason: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(WorkerLostError(worker_id, reason))
    return future


def warn_if_rounded(pool: WorkerPool, frames: int) -> None:
    """Warn of workers whose batches have more frames than were asked for."""
    for worker in pool.joined:
        if worker.frames != frames:
            warnings.warn(
                f"worker {worker.worker_id} makes batches of {worker.frames} frames instead of "
                f"{frames}, a multiple of the number of environments that it steps together",
                stacklevel=4,
            )
