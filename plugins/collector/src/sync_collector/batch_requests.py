"""The batches that workers were asked for, until they are delivered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock
from typing import Any

from tensordict import TensorDictBase

from sync_collector.collector_worker import CollectorWorker
from sync_collector.policies import PolicyError, policy_errors
from sync_collector.rollout import BatchRequest
from sync_collector.worker_pool import FailedBatchesError, PoolWorker, WorkerPool
from sync_core import WorkerError, WorkerLostError, WorkerTimeoutError
from sync_core.transports import uninterrupted


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch and the worker that made it.

    Args:
        worker_id: the worker that made it; None if all did.
        batch: the batch.
    """

    worker_id: int | None
    batch: TensorDictBase


class RandomFrames:
    """Counts frames of random actions when they are requested.

    Args:
        pool: the workers.
        frames: the least number of frames of random actions.
        together: all workers make parts of one batch. The parts must be all random or all by the
            policy, since a policy may set more entries than the action.
    """

    def __init__(self, pool: WorkerPool, frames: int = 0, *, together: bool = False) -> None:
        self.pool = pool
        #: The frames still to be requested.
        self.left = frames
        self._together = together
        self._random = frames > 0

    def ask(self, worker: PoolWorker) -> bool:
        """Return whether the next batch of a worker has random actions."""
        # Workers that are asked together get the same answer until one of them is asked again.
        asked_again = worker.random_frames is not None
        if not self._together or asked_again:
            self._random = self.left > 0
        if self._together and asked_again:
            for other in self.pool.workers.values():
                other.random_frames = None
        worker.random_frames = worker.frames if self._random else 0
        self.left -= worker.random_frames
        return self._random

    def take_back(self, worker: PoolWorker) -> None:
        """Do not count the worker's last request: it was lost or dropped."""
        self.left += worker.random_frames or 0
        worker.random_frames = None

    def state_dict(self) -> dict[str, Any]:
        """Return the frames still to be requested, and those of the last requests."""
        return {"left": self.left, "asked": [w.random_frames or 0 for w in self.pool.joined]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.left = state["left"]
        for worker in self.pool.workers.values():
            worker.random_frames = None
        for worker, frames in zip(self.pool.joined, state["asked"], strict=False):
            worker.random_frames = frames or None
        self._random = self.left > 0 or any(state["asked"])


class BatchRequests:
    """Requests batches from workers, at most one at a time from each, and delivers each batch once.

    Args:
        pool: the workers. If the pool replaces a lost worker, the new one is asked for the batch.
        timeout: the longest wait for a batch, in seconds.
        random_frames: decides which batches have random actions; None for none.
    """

    def __init__(
        self, pool: WorkerPool, timeout: float, random_frames: RandomFrames | None = None
    ) -> None:
        self._pool = pool
        self._timeout = timeout
        self._random_frames = random_frames or RandomFrames(pool)
        # The completed requests, in order, including those since dropped.
        self._ended: deque[tuple[PoolWorker, Future[TensorDictBase | None]]] = deque()
        #: The batch that was taken last, until it is delivered.
        self.in_hand: TakenBatch | None = None
        # Not an Event: Ctrl-C in wait() may leave the Event's lock held, and set() would then
        # block.
        self._news: SimpleQueue[None] = SimpleQueue()
        #: Called with a worker that did not get the weights that its batch required.
        self.on_stale: list[Callable[[int], None]] = []
        # One thread may iterate while another holds workers back.
        self._lock = RLock()
        pool.on_leave.append(self.drop)

    def __len__(self) -> int:
        """Return the number of batches requested, including postponed ones."""
        return len(self._awaited()) + len(self._postponed())

    @property
    def next_is_random(self) -> bool:
        """Return whether the next batch requested from a worker has random actions."""
        return self._random_frames.left > 0

    def busy(self, worker_id: int) -> bool:
        """Return whether a worker is making a batch."""
        batch = self._pool.workers[worker_id].batch
        return batch is not None and not batch.done()

    def at_rest(self, worker_id: int, function: Callable[[], object]) -> None:
        """Call a function when a worker is idle: now, or in another thread after its batch."""
        batch = self._pool.workers[worker_id].batch
        if batch is None or batch.done():
            function()
        else:
            batch.add_done_callback(lambda _: function())

    def ask(self, worker_id: int) -> None:
        """Ask a worker for a batch, unless one is under way. A blocked worker is asked later."""
        worker = self._pool.workers[worker_id]
        with self._lock:
            if worker.batch is not None or worker.is_removed or worker.is_quarantined:
                return
            if worker.holders:
                worker.is_postponed = True
                return
            # An inline worker works in this call, and can be interrupted.
            with uninterrupted() if self._pool.parallel else nullcontext():
                self._ask(worker)

    def require(self, worker_id: int, versions: Mapping[str, int]) -> None:
        """Require these weights, or newer ones, for the next batch of a worker."""
        with self._lock:
            self._pool.workers[worker_id].required = versions

    def hold(self, worker_id: int) -> None:
        """Block a worker's next batch; `release` must be called once for each call of this."""
        with self._lock:
            self._pool.workers[worker_id].holders += 1

    def release(self, worker_id: int) -> None:
        """Unblock a worker. It starts at once if it was asked for a batch meanwhile."""
        worker = self._pool.workers[worker_id]
        with self._lock:
            # Ctrl-C may cause a second release, so the count does not go below 0.
            worker.holders = max(0, worker.holders - 1)
            if not worker.holders and worker.is_postponed:
                worker.is_postponed = False
                self.ask(worker_id)
                self._news.put(None)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """For ``with``: no batch is under way and none starts; finished ones are delivered later.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
            FailedBatchesError: the same, and the pool replaces failed workers.
        """
        held: list[int] = []
        try:
            for worker_id in self._pool.ids:
                held.append(worker_id)
                self.hold(worker_id)
            batches = self._under_way()
            _, late = wait(batches.values(), self._timeout)
            if late and self._pool.parallel and self._pool.on_worker_failure == "restart":
                # Failed workers are not replaced here: the caller may hold a lock that replacing
                # takes.
                raise self._dropped(
                    [self._late(i) for i, batch in batches.items() if batch in late]
                )
            if late and not self._see_to_overdue():
                raise self._late(min(i for i, batch in batches.items() if batch in late))
            yield
        finally:
            for worker_id in held:
                self.release(worker_id)

    def made(self) -> dict[int, TensorDictBase]:
        """The finished batches by worker, in the order of delivery.

        Batches of lost workers, and of workers without the required weights, are left out.

        Raises:
            RemoteCallError: a worker failed.
            FailedBatchesError: the same, and the pool replaces or removes failed workers.
        """
        ended = [batch.exception() for worker, batch in self._ended if worker.batch is batch]
        failures = [
            error
            for error in ended
            if isinstance(error, WorkerError)
            and not isinstance(error, WorkerLostError)
            and not isinstance(error.__cause__, PolicyError)
        ]
        if failures and self._pool.on_worker_failure != "raise":
            raise self._dropped(failures)
        batches = {
            worker.worker_id: batch.result()
            for worker, batch in self._ended
            if worker.batch is batch and not isinstance(batch.exception(), WorkerLostError)
        }
        return {i: batch for i, batch in batches.items() if batch is not None}

    def put_back(self, made: Mapping[int, TensorDictBase]) -> None:
        """Deliver these batches again, as if workers had just made them."""
        with self._lock:
            for worker_id, batch in made.items():
                future: Future[TensorDictBase | None] = Future()
                future.set_result(batch)
                self._expect(self._pool.workers[worker_id], future)

    def take_first(self) -> TakenBatch | None:
        """Wait for the first finished batch, and store it in ``in_hand``.

        Returns None if all requests were dropped, so that no batch will come.

        Raises:
            WorkerTimeoutError: no batch was ready in time; all requests stay under way.
            WorkerError: the worker failed.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            while not self._news.empty():
                self._news.get()
            while self._ended:
                worker, made = self._ended[0]
                if worker.batch is not made:
                    self._ended.popleft()
                    continue
                batch = self._made_by(worker, made)
                if batch is not None:
                    return self.take((worker.worker_id,), TakenBatch(worker.worker_id, batch))
                deadline = time.monotonic() + self._timeout
            self._see_to_overdue()
            if not len(self):
                return None
            if not self._wait_for_news(deadline - time.monotonic()):
                if not self._see_to_overdue():
                    raise self._late(min({*self._awaited(), *self._postponed()}))
                deadline = time.monotonic() + self._timeout

    def wait_all(self) -> dict[int, TensorDictBase]:
        """Wait for the batches of all workers that were asked, and keep them until `drop`.

        Raises:
            WorkerTimeoutError: some batches were not ready in time; all requests stay under way.
            WorkerError: a worker failed.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            if self._postponed() and left:
                # Another thread blocks them, and may unblock others before these.
                self._wait_for_news(left)
                continue
            futures = self._awaited()
            done, late = wait(futures.values(), left, return_when=FIRST_EXCEPTION)
            made = {
                i: self._made_by(self._pool.workers[i], future)
                for i, future in futures.items()
                if future in done
            }
            batches = {i: batch for i, batch in made.items() if batch is not None}
            if len(batches) < len(made):
                deadline = time.monotonic() + self._timeout
                continue
            waiting = [*(i for i, batch in futures.items() if batch in late), *self._postponed()]
            if waiting and self._see_to_overdue():
                deadline = time.monotonic() + self._timeout
                continue
            if waiting:
                raise self._late(min(waiting))
            return batches

    def drop(self, worker_id: int) -> None:
        """Drop a worker's requested batch, finished or not."""
        worker = self._pool.workers[worker_id]
        with self._lock:
            worker.is_postponed, worker.required = False, {}
            if worker.batch is not None:
                worker.batch = None
                self._random_frames.take_back(worker)
            self._news.put(None)

    def drop_all(self) -> None:
        """Drop all batches."""
        with self._lock:
            for worker_id in self._pool.workers:
                self.drop(worker_id)

    def take(self, worker_ids: Iterable[int], delivered: TakenBatch) -> TakenBatch:
        """Store a batch made by some workers in ``in_hand``, and forget their requests."""
        with self._lock:
            # Not interruptible: Ctrl-C comes before the batch is stored, or after all of this.
            with uninterrupted():
                self.in_hand = delivered
                for worker_id in worker_ids:
                    self._pool.workers[worker_id].batch = None
            while self._ended and self._ended[0][0].batch is not self._ended[0][1]:
                self._ended.popleft()
        return delivered

    def _under_way(self) -> dict[int, Future[TensorDictBase | None]]:
        workers = self._pool.workers.values()
        return {w.worker_id: batch for w in workers if (batch := w.batch) is not None}

    def _awaited(self) -> dict[int, Future[TensorDictBase | None]]:
        """Return the requests under way, except those of workers in quarantine."""
        workers = self._pool.workers
        under_way = self._under_way().items()
        return {i: b for i, b in under_way if b.done() or not workers[i].is_quarantined}

    def _postponed(self) -> list[int]:
        return [w.worker_id for w in self._pool.workers.values() if w.is_postponed]

    def _wait_for_news(self, seconds: float) -> bool:
        """Wait until a request was completed, dropped or made; return False on a timeout."""
        try:
            self._news.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        return True

    def _ask(self, worker: PoolWorker) -> None:
        request = BatchRequest(
            number=worker.number,
            random=self._random_frames.ask(worker),
            versions=worker.required,
            patience=self._timeout if worker.required else 0.0,
        )
        try:
            self._expect(
                worker, self._pool.request(worker.worker_id, CollectorWorker.collect, request)
            )
        except BaseException:
            if worker.batch is None:
                self._random_frames.take_back(worker)
            raise
        worker.required = {}

    def _expect(self, worker: PoolWorker, batch: Future[TensorDictBase | None]) -> None:
        # The wait would never end for a request that is expected but not recorded.
        with uninterrupted():
            worker.batch, worker.asked_at = batch, time.monotonic()
            worker.number += 1
            batch.add_done_callback(partial(_note, self._ended, self._news, worker))

    def _made_by(
        self, worker: PoolWorker, made: Future[TensorDictBase | None]
    ) -> TensorDictBase | None:
        """Return the batch of a worker; None if the worker is asked for it again.

        A batch is requested again if a new worker replaced a lost one, or if the worker did not get
        the weights that the batch required. No batch is expected from a removed worker. Any other
        failure of the batch is raised.
        """
        error = made.exception()
        if error is None:
            batch = made.result()
            if batch is None:
                self.drop(worker.worker_id)
                for callback in self.on_stale:
                    callback(worker.worker_id)
                self.ask(worker.worker_id)
            else:
                worker.lost_in_a_row = worker.failures = 0
                worker.retry_at = 0.0
            return batch
        if not isinstance(error, WorkerError) or self._pool.on_worker_failure == "raise":
            if isinstance(error, WorkerLostError) and worker.is_removed:
                self.drop(worker.worker_id)
                return None
            with policy_errors():
                raise error
        # A replacement's policy would not fit either.
        with policy_errors():
            if isinstance(error.__cause__, PolicyError):
                raise error
        self._pool.remedy(error)
        self.drop(worker.worker_id)
        self.ask(worker.worker_id)
        return None

    def _see_to_overdue(self) -> bool:
        """Restart, remove or quarantine late workers; return whether there were any."""
        if self._pool.on_worker_failure == "raise" or not self._pool.parallel:
            return False
        now = time.monotonic()
        overdue = [
            worker
            for worker_id, batch in self._awaited().items()
            if not batch.done()
            and not (worker := self._pool.workers[worker_id]).is_restarting
            and now - worker.asked_at >= self._timeout
        ]
        for worker in overdue:
            late = self._late(worker.worker_id)
            self._pool.remedy(late)
            # A worker in quarantine may still make its batch.
            if not worker.is_quarantined:
                self.drop(worker.worker_id)
                self.ask(worker.worker_id)
        return bool(overdue)

    def _dropped(self, failures: Sequence[WorkerError]) -> FailedBatchesError:
        """Drop the batches of failed workers, and return the error about them."""
        for failure in failures:
            self.drop(failure.worker_id)
        return FailedBatchesError(failures)

    def _late(self, worker_id: int) -> WorkerTimeoutError:
        waits = "iterate again to continue waiting, as a collector in the background does, or "
        again = waits if self._pool.on_worker_failure == "raise" else ""
        return WorkerTimeoutError(
            worker_id,
            f"gave no batch within {self._timeout:g} s; {again}give it a longer timeout or fewer "
            "frames_per_batch",
        )


def _note(
    ended: deque[tuple[PoolWorker, Future[TensorDictBase | None]]],
    news: SimpleQueue[None],
    worker: PoolWorker,
    batch: Future[TensorDictBase | None],
) -> None:
    ended.append((worker, batch))
    news.put(None)
