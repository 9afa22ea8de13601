"""Decides when workers are asked for batches, and whose batch comes next."""

from __future__ import annotations

from typing import TypeAlias

from tensordict import TensorDictBase, stack

from sync_collector.batch_requests import BatchRequests, TakenBatch
from sync_collector.worker_pool import WorkerPool


class Synchronous:
    """All workers together make each batch when it is requested, with the newest weights.

    Args:
        pool: the workers.
        requests: the requests for batches.
    """

    def __init__(self, pool: WorkerPool, requests: BatchRequests) -> None:
        self._pool = pool
        self._requests = requests
        #: No worker has precedence.
        self.turn = 0

    def next_batch(self, wanted: int | None) -> TakenBatch:
        """Return the parts of all workers, stacked in the order of their ids.

        Raises:
            ValueError: the parts differ in shape, keys or dtypes; they are kept.
        """
        del wanted
        parts: dict[int, TensorDictBase] = {}
        # None if all requested workers failed, and the quarantine of others has ended since.
        while not parts:
            for worker_id in self._pool.ids:
                self._requests.ask(worker_id)
            parts = self._requests.wait_all()
        _check_alike(parts)
        together: TensorDictBase = stack(list(parts.values()))
        return self._requests.take(parts, TakenBatch(None, together))

    def go_on(self, wanted: int | None) -> None:
        """Do nothing: each batch is made when it is requested."""

    def frames_per_batch(self) -> int:
        """Return the number of frames of all workers together."""
        return sum(self._pool.frames)


class FirstReady:
    """Each batch comes from one worker, the first that is ready.

    Workers that run in parallel begin their next batch as soon as one is taken, so that they work
    while the trainer learns. Other workers would block the trainer for a batch with old weights, so
    they are asked in turn when a batch is requested.

    Args:
        pool: the workers.
        requests: the requests for batches.
    """

    def __init__(self, pool: WorkerPool, requests: BatchRequests) -> None:
        self._pool = pool
        self._requests = requests
        #: The first worker to ask among those that do not run in parallel.
        self.turn = 0

    def next_batch(self, wanted: int | None) -> TakenBatch:
        """Take the first finished batch; it stays in `BatchRequests.in_hand`.

        Args:
            wanted: the number of frames still needed, including this batch; None without a limit.

        Raises:
            StopIteration: no other batch is needed, and the worker of the last one was removed.
        """
        self._ask(wanted)
        while (taken := self._requests.take_first()) is None:
            if wanted == 0:
                raise StopIteration
            self._ask(wanted)
        return taken

    def go_on(self, wanted: int | None) -> None:
        """Ask workers that run in parallel for their next batches.

        Args:
            wanted: the number of frames still needed, without the current batch.
        """
        in_hand = self._requests.in_hand
        if in_hand is not None and in_hand.worker_id is not None:
            self.turn = in_hand.worker_id + 1
        if self._pool.parallel:
            self._ask(wanted)

    def frames_per_batch(self) -> int | None:
        """Return the number of frames in a worker's batch, if it is the same for all workers."""
        first, *others = set(self._pool.frames)
        return None if others else first

    def _ask(self, wanted: int | None) -> None:
        for worker_id in sorted(self._pool.ids, key=lambda i: (i < self.turn, i)):
            under_way = len(self._requests)
            if under_way and not self._pool.parallel:
                return
            if wanted is not None and under_way * min(self._pool.frames) >= wanted:
                return
            self._requests.ask(worker_id)


Schedule: TypeAlias = Synchronous | FirstReady


def _check_alike(parts: dict[int, TensorDictBase]) -> None:
    """Raise if the parts of a batch cannot be stacked."""
    (first_id, first), *others = parts.items()
    for worker_id, part in others:
        difference = _difference(first, part)
        if difference is not None:
            key, this, that = difference
            raise ValueError(
                f"the parts of a batch cannot be put together: {key} is {this} for worker "
                f"{first_id} and {that} for worker {worker_id}; give all workers environments "
                "alike, or use sync=False, which gives each worker's batch separately"
            )


def _difference(first: TensorDictBase, other: TensorDictBase) -> tuple[str, str, str] | None:
    if first.batch_size != other.batch_size:
        return "the shape", str(list(first.batch_size)), str(list(other.batch_size))
    here, there = (
        {
            key: f"{value.dtype} of shape {list(value.shape)} on {value.device}"
            for key, value in part.items(include_nested=True, leaves_only=True)
        }
        for part in (first, other)
    )
    for key in [*here, *there]:
        if here.get(key) != there.get(key):
            return repr(key), here.get(key, "missing"), there.get(key, "missing")
    return None
