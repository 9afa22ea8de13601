"""Takes one batch after the other from the workers, counts them, and hands them on."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from sync_core.collector.crew import Crew
from sync_core.collector.freshness import Freshness
from sync_core.collector.output import Output
from sync_core.collector.policies import PolicyError
from sync_core.collector.requests import Requests
from sync_core.collector.schedules import Delivered, Schedule
from sync_core.collector.several import SeveralModels
from sync_core.collector.stale import StaleWatch
from sync_core.collector.stats import CollectorStats, Lag
from sync_core.collector.weights import MOMENT, PolicyWeights
from sync_core.errors import ClosedError, RemoteCallError, WorkerLostError


class Delivery:
    """What a collector yields, and how much of it.

    Args:
        crew: the workers; they are ended as soon as the last batch was taken.
        schedule: says whose batch is next.
        requests: batches that workers were asked for.
        weights: what the policies act with.
        freshness: refreshes them by itself.
        stale: warns if they never are.
        output: what happens to a batch in the end.
        total_frames: the frames after which it ends; -1 for never.
        close: ends the collector, unless it has ended. It must not keep the collector alive, for a
            thread that collects in the background holds this object.
    """

    def __init__(
        self,
        *,
        crew: Crew,
        schedule: Schedule,
        requests: Requests,
        weights: PolicyWeights | SeveralModels,
        freshness: Freshness,
        stale: StaleWatch,
        output: Output,
        total_frames: int,
        close: weakref.finalize[Any, Any],
    ) -> None:
        self._crew = crew
        self._schedule = schedule
        self._requests = requests
        self._weights = weights
        self._freshness = freshness
        self._stale = stale
        self.output = output
        self._total_frames = total_frames
        self._close = close
        self._frames = self._batches = 0
        self._lag = Lag()
        # What the workers have delivered, until all of it was handed on: Ctrl-C may come
        # meanwhile, and a replay buffer may raise.
        self._in_hand: Delivered | None = None
        self._written = 0

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
            lag=self._lag.last,
            mean_lag=self._lag.total / max(1, self._batches),
            max_lag=self._lag.most,
            sync_seconds=self._weights.seconds,
        )

    def next_batch(self) -> Any:
        """The next batch, as it is yielded.

        Raises:
            StopIteration: the collector has ended.
        """
        batch = self._take(self.wanted)
        if self.wanted == 0:
            self._weights.let_end(MOMENT)
            self._crew.dismiss()
        return batch

    def count_batches(self) -> int:
        """How many batches there are in all, those delivered included.

        Raises:
            TypeError: nobody knows.
        """
        if self.wanted is None:
            raise TypeError("a collector without an end has no len(); give it total_frames")
        if self.wanted == 0:
            return self._batches
        frames = self._schedule.frames_per_batch()
        if frames is None:
            raise TypeError("workers make batches of different sizes: nobody knows how many")
        return self._batches + math.ceil(self.wanted / frames)

    def state_dict(self) -> dict[str, Any]:
        """What was delivered, and whose turn it is."""
        return {
            "frames": self._frames,
            "batches": self._batches,
            "lag": astuple(self._lag),
            "turn": sum(worker_id < self._schedule.turn for worker_id in self._crew.ids),
            "since_update": [self._freshness.batches[i] for i in self._crew.ids],
            "in_hand": self._in_hand and replace(self._in_hand, batch=self._in_hand.batch.clone()),
            "written": self._written,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._frames, self._batches = state["frames"], state["batches"]
        self._in_hand, self._written = state["in_hand"], state["written"]
        self._lag = Lag(*state["lag"])
        following = self._crew.ids[state["turn"] :]
        self._schedule.turn = following[0] if following else 0
        self._freshness.go_on(dict(zip(self._crew.ids, state["since_update"], strict=False)))

    def drop(self) -> None:
        """Let what was not handed on be lost, uncounted."""
        self._in_hand, self._written = None, 0

    def check_background(self) -> None:
        """Raise `RuntimeError` unless batches can be collected in the background."""
        self.output.check_buffer()
        if self._freshness.by_itself:
            raise RuntimeError(
                "in the background, the collector would read the policy in the middle of the "
                "trainer's steps; leave out update_after_each_batch and "
                "max_weight_update_interval, and type update_policy_weights_() after each step"
            )

    def collect_one(self) -> bool:
        """Take a batch that nobody waits for; False at the end."""
        return self.wanted != 0 and self._took(self.wanted)

    def collect_rest(self) -> bool:
        """Take a batch that a worker was asked for already; False if there is none."""
        under_way = self._in_hand is not None or len(self._requests) > 0
        return under_way and self._took(0)

    def _took(self, wanted: int | None) -> bool:
        try:
            self._take(wanted)
        except StopIteration:
            return False
        return True

    def _take(self, wanted: int | None) -> Any:
        if not self._close.alive:
            raise StopIteration
        self._stale.look()
        if self._in_hand is None:
            self._in_hand = self._next(wanted)
        batch, of_all = self._in_hand.batch, self._in_hand.worker_id is None
        for part in self.output.written_by_driver(batch, of_all=of_all)[self._written :]:
            self.output.write(part)
            self._written += 1
        yielded = self.output.yielded(batch)
        self.drop()
        self._frames += batch.numel()
        self._batches += 1
        if "policy_version" in batch:
            self._lag.count(self._weights.version - int(batch["policy_version"].min()))
        return yielded

    def _next(self, wanted: int | None) -> Delivered:
        try:
            self._freshness.refresh()
            delivered = self._schedule.next_batch(wanted)
        except KeyboardInterrupt:
            self._freshness.forget()
            raise
        except (PolicyError, RemoteCallError, WorkerLostError, ClosedError):
            if not self._close.alive:
                raise StopIteration from None
            self._close()
            raise
        if not self._close.alive:
            raise StopIteration
        if delivered.worker_id is None:
            self._freshness.delivered(None)
        return delivered
