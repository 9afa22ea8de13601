"""Worker group `thread`: each worker is a thread of this process with a queue of calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

from sync_plugin_std.workers import CallOutcome, LaunchedGroup, Launcher, RemoteCall, close_hosted
from sync_plugin_std.workers.process_rpc import PendingCalls


class ThreadGroup(LaunchedGroup["ThreadWorker"]):
    """Objects that live in this process, each run by its own thread.

    For environments that wait or compute outside the interpreter lock, and for models too big to
    have twice. Arguments and results are passed as they are, not copied.

    A thread cannot be killed. When one does not end within the time that `stop`, `remove` or
    `restart` has, they return all the same: its worker is dead, its unfinished calls fail with
    `WorkerLostError`, and the thread, a daemon, is left to itself; what it hosts is closed when it
    ends after all.

    Args:
        factory: see `WorkerGroup`.
        num_workers: see `WorkerGroup`.
        timeout: see `WorkerGroup`.

    Example:
        >>> with ThreadGroup(lambda worker_id: [worker_id], 2) as group:
        ...     group.call(1, list.__len__).result()
        1
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"parallel", "restart", "add"})

    def __init__(
        self, factory: Callable[[int], Any], num_workers: int, *, timeout: float = 60.0
    ) -> None:
        super().__init__(_ThreadLauncher(factory), num_workers, timeout=timeout)


class _ThreadLauncher(Launcher["ThreadWorker"]):
    def __init__(self, factory: Callable[[int], Any]) -> None:
        self._factory = factory

    def launch(self, worker_ids: Sequence[int]) -> Iterator[ThreadWorker]:
        for worker_id in worker_ids:
            yield ThreadWorker(worker_id, self._factory)

    def end(self, workers: Collection[ThreadWorker], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for worker in workers:
            worker.ask_to_end()
        for worker in workers:
            worker.end(deadline)


class ThreadWorker:
    """One thread, and the queue by which it is reached."""

    def __init__(self, worker_id: int, factory: Callable[[int], Any]) -> None:
        self.worker_id = worker_id
        self._inbox: SimpleQueue[tuple[int, Callable[[Any], CallOutcome]] | None] = SimpleQueue()
        self._ending = threading.Event()
        self._abandoned = False
        self._pending = PendingCalls()
        call = RemoteCall(worker_id, factory)
        self.ready: Future[None] = call.future
        self._pending.add(call, partial(self._start, factory))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ending.is_set()

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        def run(hosted: Any) -> CallOutcome:
            return CallOutcome.of(function, hosted, *args, **kwargs)

        call = RemoteCall(self.worker_id, function)
        self._pending.add(call, lambda number: self._inbox.put((number, run)))
        return call.future

    def ask_to_end(self) -> None:
        """Let the call in progress finish, and no other begin."""
        self._ending.set()
        self._inbox.put(None)

    def end(self, deadline: float) -> None:
        """Wait for the thread, and abandon it at the deadline; it is not waited for again."""
        if self._thread is not threading.current_thread() and not self._abandoned:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._abandoned = True
            self._pending.lose("was stopped, and its thread abandoned,", running=True)

    def _start(self, factory: Callable[[int], Any], number: int) -> None:
        name = f"sync worker {self.worker_id}"
        self._thread = threading.Thread(
            target=self._run, args=(factory, number), name=name, daemon=True
        )
        self._thread.start()

    def _run(self, factory: Callable[[int], Any], number: int) -> None:
        made = CallOutcome.of(factory, self.worker_id)
        self._pending.finish(number, made.without_value())
        if made.failed:
            self._pending.lose("could not make its object", running=False)
            return
        while self._run_next(made.value):
            pass
        self._pending.lose("was stopped", running=False)
        close_hosted(self.worker_id, made.value)

    def _run_next(self, hosted: Any) -> bool:
        given = self._inbox.get()
        if given is None or self._ending.is_set():
            return False
        number, run = given
        self._pending.finish(number, run(hosted))
        return True
