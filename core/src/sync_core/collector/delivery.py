"""Takes one batch after the other from the workers, counts them, and hands them on."""

from __future__ import annotations

import weakref
from typing import Any

from sync_core.collector.output import Output
from sync_core.collector.requests import Requests
from sync_core.collector.schedules import Schedule
from sync_core.collector.stats import CollectorStats
from sync_core.collector.weights import PolicyWeights
from sync_core.errors import ClosedError, RemoteCallError, WorkerLostError


class Delivery:
    """What a collector yields, and how much of it.

    Args:
        schedule: says whose batch is next.
        requests: batches that workers were asked for.
        weights: what the policies act with.
        output: what happens to a batch in the end.
        total_frames: the frames after which it ends; -1 for never.
        close: ends the collector, unless it has ended. It must not keep the collector alive, for a
            thread that collects in the background holds this object.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        requests: Requests,
        weights: PolicyWeights,
        output: Output,
        total_frames: int,
        close: weakref.finalize[Any, Any],
    ) -> None:
        self._schedule = schedule
        self._requests = requests
        self._weights = weights
        self.output = output
        self._total_frames = total_frames
        self._close = close
        self._frames = self._batches = self._lag = 0

    @property
    def wanted(self) -> int | None:
        """How many more frames are to come; None for any number."""
        return None if self._total_frames < 0 else max(0, self._total_frames - self._frames)

    def stats(self) -> CollectorStats:
        """What was collected so far, and how fresh the policies are."""
        return CollectorStats(
            frames=self._frames,
            batches=self._batches,
            version=self._weights.version,
            lag=self._lag,
            sync_seconds=self._weights.seconds,
        )

    def next_batch(self) -> Any:
        """The next batch, as it is yielded.

        Raises:
            StopIteration: the collector has ended.
        """
        return self._take(self.wanted)

    def collect_one(self) -> bool:
        """Take a batch that nobody waits for; False at the end."""
        return self.wanted != 0 and self._took(self.wanted)

    def collect_rest(self) -> bool:
        """Take a batch that a worker was asked for already; False if there is none."""
        return len(self._requests) > 0 and self._took(0)

    def _took(self, wanted: int | None) -> bool:
        try:
            self._take(wanted)
        except StopIteration:
            return False
        return True

    def _take(self, wanted: int | None) -> Any:
        if not self._close.alive:
            raise StopIteration
        try:
            delivered = self._schedule.next_batch(wanted)
        except (RemoteCallError, WorkerLostError, ClosedError):
            if not self._close.alive:
                raise StopIteration from None
            self._close()
            raise
        if not self._close.alive:
            raise StopIteration
        batch = delivered.batch
        self._frames += batch.numel()
        self._batches += 1
        if "policy_version" in batch:
            self._lag = self._weights.version - int(batch["policy_version"].min())
        return self.output.in_driver(batch, of_all=delivered.worker_id is None)
