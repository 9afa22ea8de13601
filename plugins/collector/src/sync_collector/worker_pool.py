"""The workers of a collector: a worker group, and the specs that its workers are made by."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from sync_collector.collector_worker import CollectorWorker, new_worker
from sync_collector.policies import policy_errors
from sync_collector.worker_spec import WorkerSpec
from sync_core import OptionError, UnknownWorkerError, WorkerLostError
from sync_core.workers import WorkerGroup, gather

Result = TypeVar("Result")


class WorkerPool:
    """Starts workers, builds what they host, and calls them.

    Args:
        group_class: what workers are.
        make_spec: gives the spec for a worker id and a seat.
        num_workers: how many there are at first; their ids are ``0 … num_workers - 1``.
        timeout: deadline of starting a worker, of building and of stopping, in seconds.
        worker_options: options of the group.

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
        worker_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._make_spec = make_spec
        self._timeout = timeout
        #: The number of the next worker's seat; no seat is given twice.
        self.next_seat = 0
        # What differs from the spec of workers that were added.
        self._changes: dict[int, dict[str, Any]] = {}
        # Workers that were started in place of others and never came to be like the rest.
        self._unready: dict[int, str] = {}
        # Those that have joined, and those that are being replaced: only the thread that
        # adds or restarts a worker calls it before it is like the rest.
        self._joined: set[int] = set()
        self._restarting: set[int] = set()
        #: How often a worker has joined under each id.
        self.joins: Counter[int] = Counter()
        # Those that were removed, which others may not know yet: no id is given twice.
        self._removed: set[int] = set()
        #: Held while workers are sent weights, and while one joins or leaves: a worker that is sent
        #: something is there. One change waits for another no longer than calls to workers take.
        self.lock = threading.RLock()
        #: Whether all workers were ended because nothing is left to do.
        self.dismissed = False
        #: Called with the id of every worker that is added or restarted, once it is built.
        self.on_join: list[Callable[[int], None]] = []
        #: Called with the id of every worker that is about to be removed.
        self.on_leave: list[Callable[[int], None]] = []
        #: How many frames a batch of each worker has.
        self.frames: dict[int, int] = {}
        self._counting = threading.Lock()
        self._group = group_class(
            new_worker, num_workers, timeout=timeout, **(worker_options or {})
        )
        try:
            self._build(self._group.worker_ids)
        except BaseException:
            self._group.stop()
            raise
        self._joined.update(self._group.worker_ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        if self.dismissed:
            return ()
        return tuple(i for i in self._group.worker_ids if i in self._joined)

    @property
    def parallel(self) -> bool:
        """Return whether workers run at once, and without the driver."""
        return "parallel" in self._group.capabilities

    def alive(self, worker_id: int) -> bool:
        """Return whether a worker can still be called."""
        try:
            return worker_id not in self._unready and self._group.alive(worker_id)
        except UnknownWorkerError:
            return False

    def restarting(self, worker_id: int) -> bool:
        """Return whether another is being put in place of a worker."""
        return worker_id in self._restarting

    def removed(self, worker_id: int) -> bool:
        """Return whether a worker was removed, or is about to end because of that."""
        return worker_id in self._removed

    def call(
        self, worker_id: int, function: Callable[..., Result], /, *args: Any
    ) -> Future[Result]:
        """Run ``function(host, *args)`` on a worker; see `WorkerGroup.call`."""
        if worker_id in self._unready:
            return _refused(worker_id, self._unready[worker_id])
        try:
            return self._group.call(worker_id, function, *args)
        except UnknownWorkerError:
            return _refused(worker_id, "was removed")

    def request(
        self, worker_id: int, function: Callable[..., Result], /, *args: Any
    ) -> Future[Result]:
        """The same; but a worker that is being replaced counts as lost, until it has joined."""
        if worker_id in self._restarting:
            return _refused(worker_id, "is being replaced")
        return self.call(worker_id, function, *args)

    def call_all(self, function: Callable[..., Result], /, *args: Any) -> dict[int, Future[Result]]:
        """The same on every worker at once."""
        return {worker_id: self.request(worker_id, function, *args) for worker_id in self.ids}

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
        self._changes[worker_id] = changes
        try:
            self._join(worker_id)
        except BaseException:
            self.remove(worker_id)
            raise
        return worker_id

    def restart(self, worker_id: int) -> None:
        """Put a new worker in place of one, dead or alive, under the same id.

        One that is removed meanwhile is not replaced.

        Raises as the constructor does; the worker then fails every call, and counts as dead.
        """
        self._unready.pop(worker_id, None)
        self._restarting.add(worker_id)
        try:
            self._take_place(worker_id)
        except Exception:
            # The thread that removes it ends the new one, too.
            if not self.removed(worker_id):
                raise
        finally:
            self._restarting.discard(worker_id)

    def remove(self, worker_id: int) -> None:
        """End one worker; its unfinished calls fail."""
        with self.lock:
            self._removed.add(worker_id)
            self._joined.discard(worker_id)
            for callback in self.on_leave:
                callback(worker_id)
        self._group.remove(worker_id)
        self._changes.pop(worker_id, None)
        self._unready.pop(worker_id, None)
        self._count({})

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

    def _take_place(self, worker_id: int) -> None:
        self._group.restart(worker_id)
        try:
            self._join(worker_id)
        except BaseException as error:
            self._unready[worker_id] = f"took the place of another and could not join: {error}"
            raise

    def _join(self, worker_id: int) -> None:
        self._build([worker_id])
        with self.lock:
            if self.removed(worker_id):
                return
            for callback in self.on_join:
                callback(worker_id)
            self._joined.add(worker_id)
            self.joins[worker_id] += 1
            self._restarting.discard(worker_id)

    def _build(self, worker_ids: Iterable[int]) -> None:
        calls: dict[int, Future[int]] = {}
        for worker_id in worker_ids:
            spec = self._make_spec(worker_id, self.take_seat())
            spec = replace(spec, **self._changes.get(worker_id, {}))
            calls[worker_id] = self._group.call(worker_id, CollectorWorker.build, spec)
        with policy_errors():
            made = gather(calls, self._timeout, "make its environment and policy")
        self._count(dict(zip(calls, made, strict=True)))

    def _count(self, frames: Mapping[int, int]) -> None:
        with self._counting:
            known = {**self.frames, **frames}
            self.frames = {i: known[i] for i in known if not self.removed(i)}


def _refused(worker_id: int, reason: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(WorkerLostError(worker_id, reason))
    return future


def warn_if_rounded(pool: WorkerPool, frames: int) -> None:
    """Warn of workers whose batches have more frames than were asked for."""
    for worker_id, actual in pool.frames.items():
        if actual != frames:
            warnings.warn(
                f"worker {worker_id} makes batches of {actual} frames instead of {frames}, a "
                "multiple of the number of environments that it steps together",
                stacklevel=3,
            )
