"""Worker group `process`: each worker is a process, reached over a socket pair."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

from sync_plugin_std.workers import LaunchedGroup, Launcher, pickle_factory
from sync_plugin_std.workers.process_rpc import Child

# The longest that stopping waits for a worker to end on its own, and after SIGTERM.
_ASKING = 5.0
_TERMINATING = 2.0


class ProcessGroup(LaunchedGroup[Child]):
    """Objects in their own processes, which have run nothing else: safe with CUDA and threads.

    The caller's ``__main__`` is not run again in the workers: scripts without a main guard,
    notebooks and ``python -`` work. The factory, functions, arguments, results and exceptions
    travel by cloudpickle; tensors among them are copied, never shared. Arguments are pickled by
    `call`, so changing them afterwards changes nothing.

    A worker ends with this process, however that ends, even in the middle of a call: it leaves the
    call, closes what it hosts, and is killed after 5 s. It does the same at SIGTERM. It ignores
    Ctrl-C, which is for this process to act on. On Linux, processes that a worker has started and
    not ended get SIGTERM when it has ended, and SIGKILL 2 s later; those with a process group of
    their own, such as daemons, stay.

    Stopping asks first: the call in progress has half of the timeout (at most 5 s) to finish; then
    SIGTERM, then SIGKILL.

    Args:
        factory: see `WorkerGroup`.
        num_workers: see `WorkerGroup`.
        timeout: see `WorkerGroup`.
        torch_threads: threads that torch uses in each worker; None shares the cores out.

    Example:
        >>> with ProcessGroup(lambda worker_id: [worker_id], 2) as group:
        ...     group.call(1, list.__len__).result()
        1
    """

    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"parallel", "cross_process", "descriptors", "restart", "add"}
    )

    def __init__(
        self,
        factory: Callable[[int], Any],
        num_workers: int,
        *,
        timeout: float = 60.0,
        torch_threads: int | None = None,
    ) -> None:
        if torch_threads is not None and not (isinstance(torch_threads, int) and torch_threads > 0):
            raise ValueError(f"torch_threads is {torch_threads!r}; give 1 or more, or leave it out")
        launcher = _ProcessLauncher(factory, torch_threads)
        super().__init__(launcher, num_workers, timeout=timeout)


class _ProcessLauncher(Launcher[Child]):
    def __init__(self, factory: Callable[[int], Any], torch_threads: int | None) -> None:
        self._factory = factory
        self._torch_threads = torch_threads
        self._running: weakref.WeakValueDictionary[int, Child] = weakref.WeakValueDictionary()

    def launch(self, worker_ids: Sequence[int]) -> Iterator[Child]:
        pickled = pickle_factory(self._factory, next(iter(worker_ids), 0))
        threads = self._torch_threads
        if threads is None:
            threads = max(1, _cores() // max(1, len({*self._running, *worker_ids})))
        for worker_id in worker_ids:
            child = Child(worker_id, self._factory, pickled, threads)
            self._running[worker_id] = child
            yield child

    def end(self, workers: Collection[Child], timeout: float) -> None:
        begin = time.monotonic()
        terminate_at = begin + min(timeout / 2, _ASKING)
        kill_at = terminate_at + min(timeout / 4, _TERMINATING)
        steps = (
            (Child.ask_to_end, terminate_at),
            (Child.terminate, kill_at),
            (Child.kill, begin + timeout),
        )
        running = list(workers)
        for step, until in steps:
            for worker in running:
                step(worker)
            running = [w for w in running if not w.exited(until - time.monotonic())]
        for worker in workers:
            if worker not in running:
                worker.join(begin + timeout - time.monotonic())


def _cores() -> int:
    """The cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
