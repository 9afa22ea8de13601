"""Worker group `inline`: no workers at all, every call runs at once in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from sync_core import CallOutcome, LaunchedGroup, Launcher, RemoteCall


class InlineGroup(LaunchedGroup["InlineWorker"]):
    """Objects that live in the caller's process and run in the caller's thread.

    For debugging, and for work too small to share out. `call` returns when the function has, and
    begins when what another thread calls has ended, however long that takes; the future is done. A
    KeyboardInterrupt is the caller's own and is raised by `call`.

    Args:
        factory: see `WorkerGroup`.
        num_workers: likewise.
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
        for worker in workers:
            worker.end()


class InlineWorker:
    """One hosted object, made at once."""

    def __init__(self, worker_id: int, factory: Callable[[int], Any]) -> None:
        self.worker_id = worker_id
        self.alive = True
        # Several threads may call; a hosted function may call again.
        self._one_at_a_time = threading.RLock()
        call = RemoteCall(worker_id, factory)
        self.ready: Future[None] = call.future
        made = _run(factory, worker_id)
        self._hosted = made.value
        call.finish(made.without_value())

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        call = RemoteCall(self.worker_id, function)
        with self._one_at_a_time:
            outcome = _run(function, self._hosted, *args, **kwargs)
        call.finish(outcome)
        return call.future

    def end(self) -> None:
        self.alive = False
        self._hosted = None


def _run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallOutcome:
    outcome = CallOutcome.of(function, *args, **kwargs)
    if isinstance(outcome.cause, KeyboardInterrupt):
        raise outcome.cause
    return outcome
