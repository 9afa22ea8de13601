"""The batches that workers have been asked for, until they are handed over."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from tensordict import TensorDictBase

from sync_collector.batch_request import BatchRequest
from sync_collector.collector_worker import CollectorWorker
from sync_collector.policies import policy_errors
from sync_collector.replacement import Replacement
from sync_collector.worker_pool import WorkerPool
from sync_core import WorkerLostError, WorkerTimeoutError
from sync_core.transports import uninterrupted


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch, and whose it is.

    Args:
        worker_id: the worker that made it; None if all did.
        batch: the batch.
    """

    worker_id: int | None
    batch: TensorDictBase


class Requests:
    """At most one batch under way for each worker; what was asked for is delivered once.

    Args:
        pool: the workers.
        timeout: the longest that a batch is waited for, in seconds.
        make_request: says what to ask a worker for, when it is asked.
        replacement: puts another in place of a worker that is lost, which is then asked for
            the batch; None for an error.
    """

    def __init__(
        self,
        pool: WorkerPool,
        timeout: float,
        make_request: Callable[[int], BatchRequest] = lambda _: BatchRequest(),
        replacement: Replacement | None = None,
    ) -> None:
        self._pool = pool
        self._timeout = timeout
        self._make_request = make_request
        self._replacement = replacement
        self._futures: dict[int, Future[TensorDictBase | None]] = {}
        # The requests that have ended, in that order; also those forgotten since.
        self._ended: deque[tuple[int, Future[TensorDictBase | None]]] = deque()
        #: The batch that was taken last, until it is handed over.
        self.in_hand: TakenBatch | None = None
        # Not an Event: Ctrl-C in wait() may leave its lock held, and set() would then block.
        self._news: SimpleQueue[None] = SimpleQueue()
        self._required: dict[int, int] = {}
        #: Called with the worker of every batch that is dropped.
        self.on_drop: list[Callable[[int], None]] = []
        #: Called, after that, with a worker that did not get the weights which its batch required.
        self.on_stale: list[Callable[[int], None]] = []
        self._numbers: Counter[int] = Counter()
        # The number of independent holders of each worker.
        self._held: Counter[int] = Counter()
        self._postponed: set[int] = set()
        # One thread may iterate while another holds workers back.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return how many batches are asked for and not taken, postponed ones included."""
        return len(self._futures) + len(self._postponed)

    def busy(self, worker_id: int) -> bool:
        """Return whether a worker is at work on a batch."""
        future = self._futures.get(worker_id)
        return future is not None and not future.done()

    def ask(self, worker_id: int) -> None:
        """Ask a worker for a batch, unless one is under way; later, if it is held back."""
        with self._lock:
            if worker_id in self._futures or self._pool.removed(worker_id):
                return
            if self._held[worker_id]:
                self._postponed.add(worker_id)
                return
            # A worker without its own thread works in the call, and can be interrupted.
            with uninterrupted() if self._pool.parallel else nullcontext():
                self._ask(worker_id)

    def number(self, worker_id: int) -> int:
        """Return the number of the next batch that a worker is asked for."""
        return self._numbers[worker_id]

    def require(self, worker_id: int, version: int) -> None:
        """Let a worker make the next batch that it is asked for with these weights, or newer.

        0 is for those that it has.
        """
        with self._lock:
            self._required[worker_id] = version

    def hold(self, worker_id: int) -> None:
        """Let a worker begin no other batch until it is released as often."""
        with self._lock:
            self._held[worker_id] += 1

    def release(self, worker_id: int) -> None:
        """Let a worker begin batches again, at once if it was asked for one meanwhile."""
        with self._lock:
            # Not below 0 where Ctrl-C causes a second release.
            self._held[worker_id] = max(0, self._held[worker_id] - 1)
            if not self._held[worker_id] and worker_id in self._postponed:
                self._postponed.discard(worker_id)
                self.ask(worker_id)
                self._news.put(None)

    def settle(self) -> None:
        """Wait until no batch is under way; those made are delivered later.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
        """
        futures = dict(self._futures)
        _, late = wait(futures.values(), self._timeout)
        if late:
            raise self._late(min(i for i, future in futures.items() if future in late))

    @contextmanager
    def settled(self) -> Iterator[None]:
        """For ``with``: no batch is under way, and none is begun.

        Raises as `settle` does.
        """
        held: list[int] = []
        try:
            for worker_id in self._pool.ids:
                held.append(worker_id)
                self.hold(worker_id)
            self.settle()
            yield
        finally:
            for worker_id in held:
                self.release(worker_id)

    def made(self) -> dict[int, TensorDictBase]:
        """The batches that are ready, by worker, in the order in which they will be delivered.

        Those of workers that were lost are not among them, nor of those that lack the weights.

        Raises:
            RemoteCallError: a worker failed.
        """
        batches = {
            worker_id: future.result()
            for worker_id, future in self._ended
            if self._futures.get(worker_id) is future
            and not isinstance(future.exception(), WorkerLostError)
        }
        return {i: batch for i, batch in batches.items() if batch is not None}

    def put_back(self, made: Mapping[int, TensorDictBase]) -> None:
        """Let batches be delivered as if workers had just made them."""
        with self._lock:
            for worker_id, batch in made.items():
                future: Future[TensorDictBase | None] = Future()
                future.set_result(batch)
                self._expect(worker_id, future)

    def take_first(self) -> TakenBatch | None:
        """Wait for the batch that is ready first, and keep it in hand.

        None if no batch is to come: all that were asked for have been dropped.

        Raises:
            WorkerTimeoutError: none was ready in time; all stay under way.
            WorkerError: the worker failed.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            while not self._news.empty():
                self._news.get()
            while self._ended:
                worker_id, future = self._ended[0]
                if self._futures.get(worker_id) is not future:
                    self._ended.popleft()
                    continue
                batch = self._made_by(worker_id, future)
                if batch is not None:
                    return self.take((worker_id,), TakenBatch(worker_id, batch))
                deadline = time.monotonic() + self._timeout
            if not len(self):
                return None
            if not self._wait_for_news(deadline - time.monotonic()):
                raise self._late(min({*self._futures, *self._postponed}))

    def wait_all(self) -> dict[int, TensorDictBase]:
        """Wait for the batches of all workers asked; they stay here until they are dropped.

        Raises:
            WorkerTimeoutError: some were not ready in time; all stay under way.
            WorkerError: a worker failed.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            if self._postponed and left:
                # Another thread holds them back, and may let others continue before these.
                self._wait_for_news(left)
                continue
            futures = dict(sorted(self._futures.items()))
            done, late = wait(futures.values(), left, return_when=FIRST_EXCEPTION)
            made = {i: self._made_by(i, future) for i, future in futures.items() if future in done}
            batches = {i: batch for i, batch in made.items() if batch is not None}
            if len(batches) < len(made):
                deadline = time.monotonic() + self._timeout
                continue
            if late or self._postponed:
                late_ids = [i for i, future in futures.items() if future in late]
                raise self._late(min([*late_ids, *self._postponed]))
            return batches

    def drop(self, worker_id: int) -> None:
        """Let the batch that a worker was asked for never be delivered, made or not."""
        with self._lock:
            self._postponed.discard(worker_id)
            self._required.pop(worker_id, None)
            if worker_id in self._futures:
                self._forget(worker_id)
                for callback in self.on_drop:
                    callback(worker_id)
            self._news.put(None)

    def drop_all(self) -> None:
        """Drop all batches."""
        with self._lock:
            for worker_id in {*self._futures, *self._postponed, *self._required}:
                self.drop(worker_id)

    def take(self, worker_ids: Iterable[int], delivered: TakenBatch) -> TakenBatch:
        """Keep in hand what was made of the batches of some workers, which are forgotten."""
        with self._lock:
            left = {i: future for i, future in self._futures.items() if i not in worker_ids}
            # Python handles signals at calls and jumps: Ctrl-C comes before both, or after both.
            self._futures, self.in_hand = left, delivered
            while self._ended and self._futures.get(self._ended[0][0]) is not self._ended[0][1]:
                self._ended.popleft()
        return delivered

    def _wait_for_news(self, seconds: float) -> bool:
        """Wait until a request has ended, was dropped or was made; False if none did in time."""
        try:
            self._news.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        return True

    def _ask(self, worker_id: int) -> None:
        order = replace(self._make_request(worker_id), number=self._numbers[worker_id])
        if version := self._required.get(worker_id, 0):
            order = replace(order, version=version, patience=self._timeout)
        try:
            made = self._pool.request(worker_id, CollectorWorker.collect, order)
            self._expect(worker_id, made)
        except BaseException:
            if worker_id not in self._futures:
                for callback in self.on_drop:
                    callback(worker_id)
            raise
        self._required.pop(worker_id, None)

    def _expect(self, worker_id: int, future: Future[TensorDictBase | None]) -> None:
        # A request that is expected and never recorded would be waited for.
        with uninterrupted():
            self._futures[worker_id] = future
            self._numbers[worker_id] += 1
            future.add_done_callback(functools.partial(_note, self._ended, self._news, worker_id))

    def _made_by(
        self, worker_id: int, future: Future[TensorDictBase | None]
    ) -> TensorDictBase | None:
        """The batch of a worker; None where it is asked for again.

        That is so if its worker is lost and another takes its place, or if it did not get the
        weights that the batch required. Of one that was removed, nothing is expected any more.

        Raises what else became of it.
        """
        error = future.exception()
        if error is None:
            batch = future.result()
            if batch is None:
                self._begin_again(worker_id)
            elif self._replacement is not None:
                self._replacement.delivered(worker_id)
            return batch
        if isinstance(error, WorkerLostError) and self._pool.removed(worker_id):
            self.drop(worker_id)
            return None
        if self._replacement is None or not isinstance(error, WorkerLostError):
            with policy_errors():
                raise error
        self._replacement.replace(error)
        self.drop(worker_id)
        self.ask(worker_id)
        return None

    def _begin_again(self, worker_id: int) -> None:
        self.drop(worker_id)
        for callback in self.on_stale:
            callback(worker_id)
        self.ask(worker_id)

    def _forget(self, worker_id: int) -> None:
        self._futures.pop(worker_id, None)

    def _late(self, worker_id: int) -> WorkerTimeoutError:
        return WorkerTimeoutError(
            worker_id,
            f"gave no batch within {self._timeout:g} s; iterate again to continue waiting, as a "
            "collector in the background does by itself, or give it a longer timeout or fewer "
            "frames_per_batch",
        )


def _note(
    ended: deque[tuple[int, Future[TensorDictBase | None]]],
    news: SimpleQueue[None],
    worker_id: int,
    future: Future[TensorDictBase | None],
) -> None:
    ended.append((worker_id, future))
    news.put(None)
