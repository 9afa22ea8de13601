"""The base of worker groups: starting, ending and finding workers by id."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, Protocol, TypeVar

from sync_core import WorkerGroup
from sync_core.checks import check_count, check_seconds
from sync_core.errors import ClosedError, UnknownWorkerError, WorkerTimeoutError
from sync_core.transports import release_with

# Time to end workers of a group that failed to start, or was forgotten.
_SHORT = 2.0


class LaunchedWorker(Protocol):
    """One worker, as its group sees it."""

    @property
    def worker_id(self) -> int:
        """Its id."""

    @property
    def ready(self) -> Future[None]:
        """Ends when the hosted object is made, or could not be: with the error to raise."""

    @property
    def alive(self) -> bool:
        """Return whether it can still run calls."""

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """As `WorkerGroup.call`; the future ends also if the worker has ended, or does."""


Worker = TypeVar("Worker", bound=LaunchedWorker)
Result = TypeVar("Result")


class Launcher(ABC, Generic[Worker]):
    """Starts and ends the workers of one `LaunchedGroup`, which it must not refer to."""

    @abstractmethod
    def launch(self, worker_ids: Sequence[int]) -> Iterator[Worker]:
        """Start these workers one after the other, without waiting until they are ready.

        An id is given again when its worker is restarted; the one before has been ended by then.
        """

    @abstractmethod
    def end(self, workers: Collection[Worker], timeout: float) -> None:
        """End these workers, ended ones included, within ``timeout`` seconds; fail their calls."""

    def close(self, workers: Collection[Worker], timeout: float) -> None:
        """End these, which are all, and what they have shared; may be called again."""
        self.end(workers, timeout)

    def check(self) -> None:
        """Raise `ClosedError` when no worker can be reached any more."""

    def explain_delay(self, worker: Worker) -> str:
        """Return advice about a worker that was not ready in time."""
        del worker
        return "; give the Collector, or the group, a longer timeout="


class LaunchedGroup(WorkerGroup, Generic[Worker]):
    """A worker group that keeps its workers by id, and has a `Launcher` start and end them.

    All of the workers that are started together start, or none does. One change of members is
    made at a time; calls, and `stop`, do not wait for it. A group that is forgotten ends its
    workers. In a forked process, neither that nor `stop` does anything.

    Args:
        launcher: starts and ends the workers.
        num_workers: workers to start.
        timeout: deadline in seconds for a worker to start or to stop.

    Raises:
        ValueError: ``num_workers`` is negative.

    Example:
        >>> from types import SimpleNamespace
        >>> class Here(Launcher):
        ...     def launch(self, worker_ids):
        ...         for worker_id in worker_ids:
        ...             ready = Future()
        ...             ready.set_result(None)
        ...             yield SimpleNamespace(worker_id=worker_id, ready=ready, alive=True)
        ...     def end(self, workers, timeout):
        ...         for worker in workers:
        ...             worker.alive = False
        >>> class Group(LaunchedGroup):
        ...     capabilities = frozenset({"add", "restart"})
        ...     def __init__(self, factory, num_workers, *, timeout=60.0):
        ...         super().__init__(Here(), num_workers, timeout=timeout)
        >>> group = Group(None, 2)
        >>> group.add()
        2
        >>> group.remove(0)
        >>> group.worker_ids, group.alive(2)
        ((1, 2), True)
        >>> group.stop()
        >>> group.alive(2)
        False
    """

    def __init__(self, launcher: Launcher[Worker], num_workers: int, *, timeout: float) -> None:
        num_workers = check_count(num_workers, "num_workers", least=0)
        self._launcher = launcher
        self._process = os.getpid()
        self._timeout = check_seconds(timeout)
        self._workers: dict[int, Worker] = {}
        self._next_id = num_workers
        self._closed = False
        # `_lock` guards the fields above for an instant; `_changes` lets one change of members
        # finish, which takes seconds, before the next. `call` and `stop` take the first only.
        self._lock = threading.Lock()
        self._changes = threading.Lock()
        self._workers.update(self._start(range(num_workers), launcher.close))
        release_with(self, _end_forgotten, launcher, self._workers)

    @property
    def worker_ids(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._workers))

    def call(
        self,
        worker_id: int,
        function: Callable[..., Result],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Future[Result]:
        return self._member(worker_id).call(function, args, kwargs)

    def alive(self, worker_id: int) -> bool:
        with self._lock:
            return self._find(worker_id).alive and not self._closed

    def add(self) -> int:
        return self.add_prepared(lambda _: None)

    def add_prepared(self, prepare: Callable[[int], None]) -> int:
        """Start one more worker as `add` does; for a group whose ``add`` takes options.

        Args:
            prepare: called with the worker's id before the worker is launched.
        """
        with self._changes:
            with self._lock:
                self._check_open()
                worker_id = self._next_id
                self._next_id += 1
            prepare(worker_id)
            self._admit(self._start([worker_id], self._launcher.end))
        return worker_id

    def restart(self, worker_id: int) -> None:
        with self._changes:
            worker = self._member(worker_id)
            self._launcher.end([worker], self._timeout)
            self._admit(self._start([worker.worker_id], self._launcher.end))

    def remove(self, worker_id: int) -> None:
        with self._changes:
            worker = self._member(worker_id)
            with self._lock:
                del self._workers[worker_id]
            self._launcher.end([worker], self._timeout)

    def stop(self, timeout: float | None = None) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            workers = tuple(self._workers.values())
        self._launcher.close(workers, self._timeout if timeout is None else timeout)

    def _start(
        self, worker_ids: Sequence[int], undo: Callable[[Collection[Worker], float], None]
    ) -> dict[int, Worker]:
        """Launch the workers and wait until all have made their object; all of them or none."""
        deadline = time.monotonic() + self._timeout
        started: dict[int, Worker] = {}
        try:
            for worker in self._launcher.launch(worker_ids):
                started[worker.worker_id] = worker
            waits = {worker.ready: worker for worker in started.values()}
            done, late = wait(waits, deadline - time.monotonic(), return_when=FIRST_EXCEPTION)
            for ready in done:
                ready.result()
            for worker in sorted((waits[ready] for ready in late), key=lambda w: w.worker_id):
                advice = self._launcher.explain_delay(worker)
                message = f"did not start within {self._timeout:g} s{advice}"
                raise WorkerTimeoutError(worker.worker_id, message)
        except BaseException:
            undo(started.values(), min(self._timeout, _SHORT))
            raise
        return started

    def _admit(self, started: dict[int, Worker]) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._workers.update(started)
        if closed:
            self._launcher.end(started.values(), self._timeout)
            self._check_open()

    def _member(self, worker_id: int) -> Worker:
        with self._lock:
            self._check_open()
            return self._find(worker_id)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this worker group was stopped; make a new one")
        self._launcher.check()

    def _find(self, worker_id: int) -> Worker:
        # True and False would pass for the workers 1 and 0.
        if isinstance(worker_id, bool) or worker_id not in self._workers:
            ids = ", ".join(map(str, sorted(self._workers))) or "none"
            raise UnknownWorkerError(f"no worker {worker_id!r} in this group; there are: {ids}")
        return self._workers[worker_id]


def _end_forgotten(launcher: Launcher[Worker], workers: dict[int, Worker]) -> None:
    launcher.close(workers.values(), _SHORT)
