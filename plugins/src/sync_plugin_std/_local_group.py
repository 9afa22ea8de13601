"""Who is in a group: what the inline, thread and process groups do alike."""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, Protocol, TypeVar

from sync_core import ClosedError, UnknownWorkerError, WorkerGroup, WorkerTimeoutError

# Time for workers that nobody waits for any more: the group failed to start, or was forgotten.
_SHORT = 2.0


class LocalWorker(Protocol):
    """One worker, as its group sees it."""

    @property
    def worker_id(self) -> int: ...

    @property
    def ready(self) -> Future[None]:
        """Ends when the hosted object is made."""

    @property
    def alive(self) -> bool: ...

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]: ...


Result = TypeVar("Result")
Worker = TypeVar("Worker", bound=LocalWorker)


class LocalGroup(WorkerGroup, Generic[Worker]):
    """A group that keeps its workers by id; a subclass launches and ends them.

    Args:
        factory: see `WorkerGroup`.
        num_workers: likewise.
        timeout: likewise.
    """

    def __init__(
        self, factory: Callable[[int], Any], num_workers: int, *, timeout: float = 60.0
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; give 0 or more")
        self._factory = factory
        self._timeout = timeout
        self._workers: dict[int, Worker] = {}
        self._next_id = num_workers
        self._closed = False
        # `_lock` guards the fields above for an instant; `_changes` lets one change of members
        # finish, which takes seconds, before the next. `call` and `stop` take the first only.
        self._lock = threading.Lock()
        self._changes = threading.Lock()
        self._workers.update(self._start(range(num_workers)))
        weakref.finalize(self, _end_forgotten, os.getpid(), self._workers, self._end)

    @abstractmethod
    def _launch(self, worker_ids: Sequence[int]) -> Iterator[Worker]:
        """Start the workers one after the other, and wait for none of them."""

    @staticmethod
    @abstractmethod
    def _end(workers: Collection[Worker], timeout: float) -> None:
        """End the workers, ended ones included, within ``timeout`` seconds."""

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
        with self._changes:
            with self._lock:
                self._check_open()
                worker_id = self._next_id
                self._next_id += 1
            self._admit(self._start([worker_id]))
        return worker_id

    def restart(self, worker_id: int) -> None:
        with self._changes:
            worker = self._member(worker_id)
            self._end([worker], self._timeout)
            self._admit(self._start([worker.worker_id]))

    def remove(self, worker_id: int) -> None:
        with self._changes:
            worker = self._member(worker_id)
            with self._lock:
                del self._workers[worker_id]
            self._end([worker], self._timeout)

    def stop(self, timeout: float | None = None) -> None:
        with self._lock:
            self._closed = True
            workers = tuple(self._workers.values())
        self._end(workers, self._timeout if timeout is None else timeout)

    def _start(self, worker_ids: Sequence[int]) -> dict[int, Worker]:
        """Launch the workers and wait until all have made their object; all of them or none."""
        deadline = time.monotonic() + self._timeout
        started: dict[int, Worker] = {}
        try:
            for worker in self._launch(worker_ids):
                started[worker.worker_id] = worker
            waits = {worker.ready: worker_id for worker_id, worker in started.items()}
            done, late = wait(waits, deadline - time.monotonic(), return_when=FIRST_EXCEPTION)
            for ready in done:
                ready.result()
            for worker_id in sorted(waits[ready] for ready in late):
                raise WorkerTimeoutError(
                    worker_id,
                    f"did not start within {self._timeout:g} s; give the group a longer timeout",
                )
        except BaseException:
            self._end(started.values(), min(self._timeout, _SHORT))
            raise
        return started

    def _admit(self, started: dict[int, Worker]) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._workers.update(started)
        if closed:
            self._end(started.values(), self._timeout)
            self._check_open()

    def _member(self, worker_id: int) -> Worker:
        with self._lock:
            self._check_open()
            return self._find(worker_id)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this worker group was stopped; make a new one")

    def _find(self, worker_id: int) -> Worker:
        # True and False would pass for the workers 1 and 0.
        if isinstance(worker_id, bool) or worker_id not in self._workers:
            ids = ", ".join(map(str, sorted(self._workers))) or "none"
            raise UnknownWorkerError(f"no worker {worker_id!r} in this group; there are: {ids}")
        return self._workers[worker_id]


def _end_forgotten(
    owner: int, workers: dict[int, Worker], end: Callable[[Collection[Worker], float], None]
) -> None:
    # A fork of the owner has the group in its memory; the workers are not its to end.
    if os.getpid() == owner:
        end(workers.values(), _SHORT)
