"""The batches that workers have been asked for and that nobody has taken yet."""

from __future__ import annotations

import functools
import time
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import Empty, SimpleQueue
from typing import Any

from tensordict import TensorDictBase

from sync_core.collector.rollout import Rollout
from sync_core.errors import WorkerTimeoutError
from sync_core.workers import WorkerGroup


class Requests:
    """At most one batch under way for each worker; what was asked for is delivered once.

    Args:
        group: the workers.
        timeout: the longest that a batch is waited for, in seconds.
    """

    def __init__(self, group: WorkerGroup, timeout: float) -> None:
        self._group = group
        self._timeout = timeout
        self._futures: dict[int, Future[TensorDictBase]] = {}
        self._ready: SimpleQueue[int] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._futures)

    def ask(self, worker_id: int) -> None:
        """Ask a worker for a batch, unless one is under way."""
        if worker_id in self._futures:
            return
        future = self._futures[worker_id] = self._group.call(worker_id, Rollout.collect)
        future.add_done_callback(functools.partial(_put, self._ready, worker_id))

    def take_first(self) -> tuple[int, TensorDictBase]:
        """Wait for the batch that is ready first: its worker, and the batch.

        Raises:
            WorkerTimeoutError: none was ready in time; all stay under way.
            WorkerError: the worker failed.
        """
        try:
            worker_id = self._ready.get(timeout=self._timeout)
        except Empty:
            raise self._late(min(self._futures)) from None
        return worker_id, self._futures.pop(worker_id).result()

    def take_all(self) -> list[TensorDictBase]:
        """Wait for the batches of all workers asked, in the order of their ids.

        Raises:
            WorkerTimeoutError: some were not ready in time; all stay under way.
            WorkerError: a worker failed.
        """
        futures = dict(sorted(self._futures.items()))
        done, late = wait(futures.values(), self._timeout, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if late:
            raise self._late(min(i for i, future in futures.items() if future in late))
        self._futures.clear()
        self._ready = SimpleQueue()
        return [future.result() for future in futures.values()]

    def _late(self, worker_id: int) -> WorkerTimeoutError:
        return WorkerTimeoutError(
            worker_id,
            f"gave no batch within {self._timeout:g} s; iterate again to go on waiting, or give "
            "the collector a longer timeout or fewer frames_per_batch",
        )


def gather(futures: dict[int, Future[Any]], timeout: float, what: str) -> list[Any]:
    """The results of calls to workers, in the order given.

    Args:
        futures: the calls, by worker.
        timeout: seconds for all of them together.
        what: what the workers were to do, for the message.

    Raises:
        WorkerTimeoutError: a call did not end in time.
        WorkerError: a call failed.
    """
    deadline = time.monotonic() + timeout
    results = []
    for worker_id, future in futures.items():
        if not wait([future], max(0.0, deadline - time.monotonic())).done:
            raise WorkerTimeoutError(worker_id, f"did not {what} within {timeout:g} s")
        results.append(future.result())
    return results


def _put(ready: SimpleQueue[int], worker_id: int, future: Future[Any]) -> None:
    del future
    ready.put(worker_id)
