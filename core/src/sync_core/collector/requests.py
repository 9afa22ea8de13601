"""The batches that workers have been asked for and that nobody has taken yet."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import Empty, SimpleQueue
from typing import Any

from tensordict import TensorDictBase

from sync_core.collector.crew import Crew
from sync_core.collector.host import Host
from sync_core.collector.order import Order
from sync_core.errors import WorkerTimeoutError


class Requests:
    """At most one batch under way for each worker; what was asked for is delivered once.

    Args:
        crew: the workers.
        timeout: the longest that a batch is waited for, in seconds.
        make_order: says what to ask a worker for, when it is asked.
    """

    def __init__(
        self,
        crew: Crew,
        timeout: float,
        make_order: Callable[[int], Order] = lambda _: Order(),
    ) -> None:
        self._crew = crew
        self._timeout = timeout
        self._make_order = make_order
        self._futures: dict[int, Future[TensorDictBase]] = {}
        self._ready: SimpleQueue[int] = SimpleQueue()
        self._held: set[int] = set()
        self._postponed: set[int] = set()
        # One thread may iterate while another holds workers back.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """How many batches are asked for and not taken, postponed ones included."""
        return len(self._futures) + len(self._postponed)

    def busy(self, worker_id: int) -> bool:
        """Whether a worker is at work on a batch."""
        future = self._futures.get(worker_id)
        return future is not None and not future.done()

    def ask(self, worker_id: int) -> None:
        """Ask a worker for a batch, unless one is under way; later, if it is held back."""
        with self._lock:
            if worker_id in self._futures:
                return
            if worker_id in self._held:
                self._postponed.add(worker_id)
                return
            order = self._make_order(worker_id)
            future = self._crew.call(worker_id, Host.collect, order)
            self._futures[worker_id] = future
        future.add_done_callback(functools.partial(_put, self._ready, worker_id))

    def hold(self, worker_id: int) -> None:
        """Let a worker begin no other batch until it is released."""
        with self._lock:
            self._held.add(worker_id)

    def release(self, worker_id: int) -> None:
        """Let a worker begin batches again, at once if it was asked for one meanwhile."""
        with self._lock:
            self._held.discard(worker_id)
            if worker_id in self._postponed:
                self._postponed.discard(worker_id)
                self.ask(worker_id)

    def settle(self) -> None:
        """Wait until no batch is under way; those made are delivered later.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
        """
        futures = dict(self._futures)
        _, late = wait(futures.values(), self._timeout)
        if late:
            raise self._late(min(i for i, future in futures.items() if future in late))

    def take_first(self) -> tuple[int, TensorDictBase]:
        """Wait for the batch that is ready first: its worker, and the batch.

        Raises:
            WorkerTimeoutError: none was ready in time; all stay under way.
            WorkerError: the worker failed.
        """
        try:
            worker_id = self._ready.get(timeout=self._timeout)
        except Empty:
            raise self._late(min({*self._futures, *self._postponed})) from None
        return worker_id, self._futures.pop(worker_id).result()

    def wait_all(self) -> dict[int, TensorDictBase]:
        """Wait for the batches of all workers asked; they stay here until they are dropped.

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
        return {worker_id: future.result() for worker_id, future in futures.items()}

    def drop_all(self) -> None:
        """Forget the batches that `wait_all` gave."""
        self._futures.clear()
        self._ready = SimpleQueue()

    def _late(self, worker_id: int) -> WorkerTimeoutError:
        return WorkerTimeoutError(
            worker_id,
            f"gave no batch within {self._timeout:g} s; iterate again to go on waiting, or give "
            "the collector a longer timeout or fewer frames_per_batch",
        )


def _put(ready: SimpleQueue[int], worker_id: int, future: Future[Any]) -> None:
    del future
    ready.put(worker_id)
