"""Worker group `inline`: no workers at all, every call runs at once in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from sync_plugin_std.workers import CallOutcome, LaunchedGroup, Launcher, RemoteCall, close_hosted


class InlineGroup(LaunchedGroup["InlineWorker"]):
    """Objects that live in the caller's process and run in the caller's thread.

    For debugging, and for work too small to share out. `call` returns when the function has, and
    begins when what another thread calls has ended, however long that takes; the future is done. A
    KeyboardInterrupt is the caller's own and is raised by `call`. Ending a worker waits for no call
    of another thread, which then closes the object when it has ended.

    Args:
        factory: see `WorkerGroup`.
        num_workers: see `WorkerGroup`.
        timeout: not used; nothing is waited for.

    Example:
        >>> group = InlineGroup(lambda worker_id: [worker_id], 2)
        >>> group.call(1, list.__len__).result()
        1
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"restart", "add"})

    def __init__(
        self, factory: Callable[[int], Any], num_workers: int, *, timeout: float = 60.0
    ) -> None:
        super().__init__(_InlineLauncher(factory), num_workers, timeout=timeout)


class _InlineLauncher(Launcher["InlineWorker"]):
    def __init__(self, factory: Callable[[int], Any]) -> None:
        self._factory = factory

    def launch(self, worker_ids: Sequence[int]) -> Iterator[InlineWorker]:
        for worker_id in worker_ids:
            worker = InlineWorker(worker_id, self._factory)
            # Nothing is gained by making the other objects once one could not be made.
            worker.ready.result()
            yield worker

    def end(self, workers: Collection[InlineWorker], timeout: float) -> None:
        del timeout
        with ExitStack() as each:
            for worker in workers:
                each.callback(worker.end)


class InlineWorker:
    """One hosted object, made at once."""

    def __init__(self, worker_id: int, factory: Callable[[int], Any]) -> None:
        self.worker_id = worker_id
        self.alive = True
        # Several threads may call; a hosted function may call again.
        self._one_at_a_time = threading.RLock()
        self._running = 0
        call = RemoteCall(worker_id, factory)
        self.ready: Future[None] = call.future
        made = _run(factory, worker_id)
        self._hosted = made.value
        self._open = not made.failed
        call.finish(made.without_value())

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        call = RemoteCall(self.worker_id, function)
        with self._at_work():
            if not self.alive:
                call.lose(f"was stopped before it could run {call.name}")
                return call.future
            outcome = _run(function, self._hosted, *args, **kwargs)
        call.finish(outcome)
        return call.future

    def end(self) -> None:
        self.alive = False
        # A call in progress may take long; its thread does this when it has ended.
        if self._one_at_a_time.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._one_at_a_time.release()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        try:
            with self._one_at_a_time:
                self._running += 1
                try:
                    yield
                finally:
                    self._running -= 1
        finally:
            # Only now: a thread that ended it since then has found no call in progress.
            if not self.alive:
                self.end()

    def _close(self) -> None:
        if self._open and not self._running:
            self._open = False
            hosted, self._hosted = self._hosted, None
            close_hosted(self.worker_id, hosted)


def _run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallOutcome:
    outcome = CallOutcome.of(function, *args, **kwargs)
    if isinstance(outcome.cause, KeyboardInterrupt):
        raise outcome.cause
    return outcome
