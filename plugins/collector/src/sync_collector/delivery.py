"""Takes batches from the workers, counts them, and delivers them."""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from tensordict import TensorDictBase

from sync_collector.auto_update import AutoUpdate, StaleWatch
from sync_collector.batch_requests import BatchRequests, TakenBatch
from sync_collector.episodes import RecentEpisodes, select_totals, split_trajectories
from sync_collector.model_weights import ModelWeights
from sync_collector.policies import PolicyError
from sync_collector.schedules import Schedule
from sync_collector.worker_pool import WorkerPool
from sync_core import ClosedError, RemoteCallError, WorkerLostError


class ReplayBuffer(Protocol):
    """The interface of a replay buffer: `extend`. TorchRL's replay buffers have it."""

    def extend(self, batch: Any, /) -> Any:
        """Add the data of one worker: frames, or trajectories if the collector splits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Post-processes batches, in the order of the arguments, and writes them to the replay buffer.

    Args:
        split_trajs: put each trajectory into its own row.
        postproc: changes the batch.
        replay_buffer: the buffer that batches are written to; None to yield them.
        extend_in_workers: let the workers do all of this; they then deliver only the number of
            frames and their versions.
        episode_stats: also deliver the totals of episodes.
    """

    split_trajs: bool = False
    postproc: Callable[[TensorDictBase], Any] | None = None
    replay_buffer: ReplayBuffer | None = None
    extend_in_workers: bool = False
    episode_stats: bool = False

    def check_buffer(self) -> None:
        """Raise if there is no replay buffer for batches that are collected in the background."""
        if self.replay_buffer is None:
            raise RuntimeError(
                "batches that are made in the background are not taken; give the collector "
                "replay_buffer=…, or iterate over it"
            )

    def in_worker(self, made: TensorDictBase) -> TensorDictBase:
        """Write a batch in the worker, and return the part that it delivers."""
        delivered = made.select("policy_version", strict=False)
        if self.episode_stats:
            delivered.update(select_totals(made))
        self.write(made)
        return delivered

    def written_by_driver(self, batch: TensorDictBase, *, of_all: bool) -> Sequence[TensorDictBase]:
        """Return the parts of a delivered batch to write to the replay buffer.

        Args:
            batch: the batch.
            of_all: whether the first dimension is the workers. Each worker's part is written
                separately.
        """
        if self.replay_buffer is None or self.extend_in_workers:
            return []
        return batch.unbind(0) if of_all else [batch]

    def write(self, made: TensorDictBase) -> None:
        """Write the data of one worker to the replay buffer."""
        assert self.replay_buffer is not None
        _given("the replay buffer", self.replay_buffer.extend, self._finish(made))

    def yielded(self, batch: TensorDictBase) -> Any:
        """Return the batch to yield; None if it is written to a replay buffer."""
        return self._finish(batch) if self.replay_buffer is None else None

    def _finish(self, batch: TensorDictBase) -> Any:
        # A copy of the TensorDict, not of its tensors: the batch is still counted, or finished
        # again.
        batch = batch.copy()
        if self.split_trajs:
            batch = split_trajectories(batch)
        return batch if self.postproc is None else _given("postproc", self.postproc, batch)


def _given(name: str, function: Callable[[Any], Any], value: Any) -> Any:
    """Call the user's function for a batch or its statistics, and return its result."""
    try:
        return function(value)
    except StopIteration as error:
        # StopIteration would end the loop over the collector, as if all frames had been yielded.
        raise RuntimeError(f"{name} raised StopIteration, as next() does at an end") from error


@dataclass(frozen=True, slots=True)
class CollectorStats:
    """Counters of a collector.

    Args:
        frames: frames delivered.
        batches: batches delivered.
        version: the newest version of the policy; 0 before the first update.
        lag: the newest version minus the oldest version in the last batch, at its delivery. Before
            the first update, each batch before which the trainer's policy has changed counts as a
            version.
        mean_lag: the mean lag over all batches delivered.
        max_lag: the largest lag of all batches.
        sync_seconds: how long the last `update_policy_weights_` took, from the call to the last
            worker's acknowledgement; 0.0 before the first. Updates with ``blocking=False`` and
            automatic updates count only the time that the caller waited.
        frames_per_second: frames delivered, divided by the seconds from the call for the first
            batch to the delivery of the last one; this includes the trainer's own time.
        episodes: the number of episodes that have ended, if ``episode_stats=True``.
        episode_reward: the mean total reward of the last 100 of them; NaN before the first.
        episode_length: the mean number of steps of the last 100 of them; NaN before the first.
    """

    frames: int = 0
    batches: int = 0
    version: int = 0
    lag: int = 0
    mean_lag: float = 0.0
    max_lag: int = 0
    sync_seconds: float = 0.0
    frames_per_second: float = field(default=0.0, compare=False)
    episodes: int = 0
    episode_reward: float = field(default=math.nan, compare=False)
    episode_length: float = field(default=math.nan, compare=False)


#: The longest time in seconds that a pending update may delay the end of a collector.
LET_END = 0.5


@dataclass(slots=True)
class _BatchProgress:
    """The progress of delivering the current batch.

    Args:
        noted: whether automatic updates counted it and its workers were asked for more.
        written: how many of its parts were written into the replay buffer.
        yielded: the result to yield, in a tuple; None before there is one.
    """

    noted: bool = False
    written: int = 0
    yielded: tuple[Any] | None = None


class BatchDelivery:
    """Delivers batches and counts them.

    Args:
        pool: the workers; they are ended after the last batch was taken.
        schedule: decides which worker's batch is next.
        requests: the requests for batches.
        weights: the weights of the policies.
        auto_update: the automatic updates.
        stale: warns if workers are never updated.
        output: post-processes and writes batches.
        total_frames: the collector ends after this number of frames; -1 for never.
        observers: called with the statistics before each batch is delivered; they include that
            batch.
        close: ends the collector, unless it has ended. It must hold the collector weakly, because
            the background thread holds this object.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        schedule: Schedule,
        requests: BatchRequests,
        weights: ModelWeights,
        auto_update: AutoUpdate,
        stale: StaleWatch,
        output: Output,
        total_frames: int,
        observers: Sequence[Callable[[CollectorStats], object]],
        close: weakref.finalize[Any, Any],
    ) -> None:
        self._pool = pool
        self._schedule = schedule
        self._requests = requests
        self._weights = weights
        self._auto_update = auto_update
        self._stale = stale
        self.output = output
        self._total_frames = total_frames
        self._observers = observers
        self._close = close
        # Version and sync_seconds are filled in by `stats`.
        self._counts = CollectorStats()
        self._episodes = RecentEpisodes()
        # The time of the first call, and the frames delivered before it.
        self._began: tuple[float, int] | None = None
        # Kept until the batch is delivered: Ctrl-C or a replay buffer may raise before that.
        self._progress = _BatchProgress()

    @property
    def wanted(self) -> int | None:
        """Return the number of frames still to deliver; None without a limit."""
        return None if self._total_frames < 0 else max(0, self._total_frames - self._counts.frames)

    def stats(self) -> CollectorStats:
        """The counts of collected frames and batches, and the lag of policies."""
        return self._current(self._counts)

    def next_batch(self) -> Any:
        """Return the next item to yield.

        Raises:
            StopIteration: the collector has ended.
        """
        return self._take(self.wanted, end_workers=True)

    def count_batches(self) -> int:
        """Return the total number of batches, including those delivered.

        Raises:
            TypeError: the number is unknown.
        """
        if self.wanted is None:
            raise TypeError("a collector without an end has no len(); give it total_frames")
        if self.wanted == 0:
            return self._counts.batches
        frames = self._schedule.frames_per_batch()
        if frames is None:
            raise TypeError("workers make batches of different sizes, so their number is unknown")
        return self._counts.batches + math.ceil(self.wanted / frames)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, the current batch, and the next worker."""
        in_hand, progress = self._requests.in_hand, self._progress
        return {
            "counts": asdict(self._counts),
            "episodes": asdict(self._episodes),
            "turn": sum(worker_id < self._schedule.turn for worker_id in self._pool.ids),
            "since_update": [worker.batches for worker in self._pool.joined],
            "in_hand": in_hand and replace(in_hand, batch=in_hand.batch.clone()),
            "noted": progress.noted,
            "written": progress.written,
            "yielded": copy.deepcopy(progress.yielded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._counts = CollectorStats(**state["counts"])
        self._episodes = RecentEpisodes(**state["episodes"])
        self._began = None
        in_hand = state["in_hand"]
        yielded = copy.deepcopy(state["yielded"])
        self._progress = _BatchProgress(state["noted"], state["written"], yielded)
        self._requests.in_hand = in_hand and replace(in_hand, batch=in_hand.batch.clone())
        following = self._pool.ids[state["turn"] :]
        self._schedule.turn = following[0] if following else 0
        self._auto_update.load_state_dict(state["since_update"])
        self._stale.restart()

    def drop(self) -> None:
        """Drop the batches that were not delivered, without counting them."""
        self._requests.in_hand, self._progress = None, _BatchProgress()

    def check_background(self) -> None:
        """Raise `RuntimeError` unless batches can be collected in the background."""
        self.output.check_buffer()
        if self._auto_update.enabled:
            raise RuntimeError(
                "in the background, the collector would read the policy in the middle of the "
                "trainer's steps; leave out update_after_each_batch and "
                "max_weight_update_interval, and type update_policy_weights_() after each step"
            )

    def collect_one(self) -> bool:
        """Take a batch for the background thread; return False at the end."""
        return self.wanted != 0 and self._took(self.wanted)

    def collect_rest(self) -> bool:
        """Take a batch that was already requested; return False if there is none."""
        under_way = self._requests.in_hand is not None or len(self._requests) > 0
        return under_way and self._took(0)

    def _took(self, wanted: int | None) -> bool:
        try:
            self._take(wanted)
        except StopIteration:
            return False
        return True

    def _take(self, wanted: int | None, *, end_workers: bool = False) -> Any:
        if not self._close.alive:
            raise StopIteration
        self._stale.look(random=self._requests.next_is_random)
        if self._began is None:
            self._began = time.monotonic(), self._counts.frames
        in_hand = self._next(wanted)
        progress = self._progress
        if progress.yielded is None:
            batch, of_all = in_hand.batch, in_hand.worker_id is None
            for part in self.output.written_by_driver(batch, of_all=of_all)[progress.written :]:
                self.output.write(part)
                progress.written += 1
            progress.yielded = (self.output.yielded(batch),)
        episodes = self._episodes.with_batch(in_hand.batch)
        counts = self._counted(in_hand.batch, episodes, *self._began)
        for observe in self._observers:
            _given("what log_to names", observe, self._current(counts))
        if end_workers and 0 <= self._total_frames <= counts.frames:
            self._weights.let_end(LET_END)
            self._pool.dismiss()
        following, yielded = _BatchProgress(), progress.yielded[0]
        # Nothing is called from here on: Ctrl-C comes either before the batch counts, and the next
        # call delivers it, or after it was delivered.
        self._counts, self._progress, self._requests.in_hand = counts, following, None
        self._episodes = episodes
        return yielded

    def _current(self, counts: CollectorStats) -> CollectorStats:
        return replace(counts, version=self._weights.version, sync_seconds=self._weights.seconds)

    def _counted(
        self, batch: TensorDictBase, episodes: RecentEpisodes, began: float, frames_before: int
    ) -> CollectorStats:
        """Return the statistics with a batch added."""
        old, lag = self._counts, 0
        frames = old.frames + batch.numel()
        if "policy_version" in batch:
            oldest = int(batch["policy_version"].min())
            lag = self._weights.version - oldest + self._stale.changes
        return replace(
            old,
            frames=frames,
            batches=old.batches + 1,
            lag=lag,
            mean_lag=(old.mean_lag * old.batches + lag) / (old.batches + 1),
            max_lag=max(old.max_lag, lag),
            # A clock of low resolution may not have advanced since the first call.
            frames_per_second=(frames - frames_before) / max(time.monotonic() - began, 1e-9),
            episodes=episodes.count,
            episode_reward=episodes.mean_reward,
            episode_length=episodes.mean_length,
        )

    def _next(self, wanted: int | None) -> TakenBatch:
        """Return the batch being delivered, or wait for the next one."""
        in_hand = self._requests.in_hand
        if in_hand is not None and self._progress.noted:
            return in_hand
        try:
            if in_hand is None:
                self._auto_update.refresh()
                in_hand = self._schedule.next_batch(wanted)
            if not self._close.alive:
                raise StopIteration
            self._auto_update.delivered(in_hand.worker_id)
            self._schedule.go_on(None if wanted is None else wanted - in_hand.batch.numel())
        except KeyboardInterrupt:
            self._auto_update.forget()
            raise
        except (PolicyError, RemoteCallError, WorkerLostError, ClosedError):
            if not self._close.alive:
                raise StopIteration from None
            self._close()
            raise
        self._progress.noted = True
        return in_hand
