"""When workers are asked for batches, and whose batch comes next."""

from __future__ import annotations

from typing import Protocol

from tensordict import TensorDictBase, stack

from sync_core.collector.requests import Requests
from sync_core.workers import WorkerGroup


class Schedule(Protocol):
    """Gives one batch after the other."""

    def next_batch(self, wanted: int | None) -> TensorDictBase:
        """The next batch.

        Args:
            wanted: how many more frames can be of use, this batch's included; None for any number.

        Raises:
            WorkerError: a worker failed, or is late.
        """


class Synchronous:
    """All workers make their part of a batch when it is wanted, with the newest weights.

    Args:
        group: the workers.
        timeout: the longest that a batch is waited for, in seconds.
    """

    def __init__(self, group: WorkerGroup, timeout: float) -> None:
        self._group = group
        self._requests = Requests(group, timeout)

    def next_batch(self, wanted: int | None) -> TensorDictBase:
        """The parts of all workers, stacked in the order of their ids."""
        del wanted
        for worker_id in self._group.worker_ids:
            self._requests.ask(worker_id)
        together: TensorDictBase = stack(self._requests.take_all())
        return together


class FirstReady:
    """Each batch is one worker's, the first that is ready.

    Workers that run by themselves begin their next batch as soon as one is taken, so that they
    work while the trainer learns. Others would only keep the trainer waiting for a batch made
    with old weights; they are asked in turn, when a batch is wanted.

    Args:
        group: the workers.
        frames_per_batch: the frames in a batch.
        timeout: the longest that a batch is waited for, in seconds.
    """

    def __init__(self, group: WorkerGroup, frames_per_batch: int, timeout: float) -> None:
        self._group = group
        self._frames_per_batch = frames_per_batch
        self._requests = Requests(group, timeout)
        self._works_ahead = "parallel" in group.capabilities
        self._turn = 0

    def next_batch(self, wanted: int | None) -> TensorDictBase:
        """The batch that is ready first."""
        self._ask(wanted)
        worker_id, batch = self._requests.take_first()
        self._turn = worker_id + 1
        if self._works_ahead:
            self._ask(None if wanted is None else wanted - batch.numel())
        return batch

    def _ask(self, wanted: int | None) -> None:
        for worker_id in sorted(self._group.worker_ids, key=lambda i: (i < self._turn, i)):
            under_way = len(self._requests)
            if under_way and not self._works_ahead:
                return
            if wanted is not None and under_way * self._frames_per_batch >= wanted:
                return
            self._requests.ask(worker_id)
