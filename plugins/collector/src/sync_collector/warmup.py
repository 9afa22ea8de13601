"""Random actions at first: at least that many frames of all workers together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sync_collector.batch_request import BatchRequest
from sync_collector.worker_pool import WorkerPool


class Warmup:
    """Says what to ask each worker for; frames count when they are asked for.

    Args:
        pool: the workers.
        frames: the least number of frames of random actions.
        together: all workers are asked in turn for parts of one batch, which must be alike: a
            policy may set more than the action.
    """

    def __init__(self, pool: WorkerPool, frames: int, *, together: bool) -> None:
        self._pool = pool
        # The frames that are still to be asked for.
        self._left = frames
        self._together = together
        self._random = frames > 0
        # What each was asked for last; of workers that are asked together, in this round.
        self._asked: dict[int, int] = {}

    def order(self, worker_id: int) -> BatchRequest:
        """Return what to ask a worker for next."""
        if not self._together or worker_id in self._asked:
            self._random = self._left > 0
        if self._together and worker_id in self._asked:
            self._asked.clear()
        self._asked[worker_id] = self._pool.frames[worker_id] if self._random else 0
        self._left -= self._asked[worker_id]
        return BatchRequest(random=self._random)

    def take_back(self, worker_id: int) -> None:
        """Do not count what a worker was asked for last: it is lost, or dropped."""
        self._left += self._asked.pop(worker_id, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the frames that are still to be asked for, and those asked for last."""
        return {"left": self._left, "asked": [self._asked.get(i, 0) for i in self._pool.ids]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._left = state["left"]
        asked = zip(self._pool.ids, state["asked"], strict=False)
        self._asked = {worker_id: frames for worker_id, frames in asked if frames}
        self._random = self._left > 0 or any(self._asked.values())
