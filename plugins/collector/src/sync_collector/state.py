"""Saves and loads the state of a collector: its counts, and the state of each worker."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sync_collector.batch_requests import BatchRequests, RandomFrames
from sync_collector.collector_worker import CollectorWorker
from sync_collector.delivery import BatchDelivery
from sync_collector.model_weights import ModelWeights
from sync_collector.worker_pool import WorkerPool
from sync_core import RemoteCallError
from sync_plugin_std.workers import gather


@dataclass(frozen=True, slots=True)
class State:
    """Saves and loads the state of a collector whose workers are idle.

    Workers are identified by their order, not by their ids.

    Args:
        pool: the workers.
        requests: the requests, with batches that were not taken yet.
        delivery: the counts of delivered batches.
        weights: the weights of the policies.
        random_frames: the number of random frames still to be made.
        timeout: deadline of calls to workers, in seconds.
    """

    pool: WorkerPool
    requests: BatchRequests
    delivery: BatchDelivery
    weights: ModelWeights
    random_frames: RandomFrames
    timeout: float

    def finish_batches(self) -> None:
        """Finish batches that were interrupted."""
        workers = self.pool.joined
        calls = {
            w.worker_id: self.pool.request(w.worker_id, CollectorWorker.midway, w.number)
            for w in workers
        }
        midway = gather(calls, self.timeout, "finish its batch")
        for worker_id in (i for i, cut_short in zip(calls, midway, strict=True) if cut_short):
            self.requests.ask(worker_id)

    def save(self) -> dict[str, Any]:
        """Return a copy of the whole state."""
        ids = self.pool.ids
        # A worker that is being removed may have made a batch, which is lost.
        made = {i: batch for i, batch in self.requests.made().items() if i in ids}
        workers = self.pool.gather_all("save its state", CollectorWorker.state_dict)
        lost = [i for i, state in zip(ids, workers, strict=True) if state["env"] is None]
        if lost:
            warnings.warn(
                f"the environments of workers {lost} cannot be saved, and will begin new episodes "
                "when this state is loaded; write save_state() and load_state() to continue "
                "(sync_collector.envs.Env)",
                stacklevel=6,
            )
        return {
            "delivery": self.delivery.state_dict(),
            "version": self.weights.version,
            "random_frames": self.random_frames.state_dict(),
            "seats": self.pool.next_seat,
            "frames_per_worker": [worker.frames for worker in self.pool.joined],
            "workers": workers,
            "made": [(ids.index(i), batch.clone()) for i, batch in made.items()],
        }

    def seed(self, seed: int, static_seed: bool) -> int:
        """Seed the workers in order and start new episodes; return the last worker's seed."""
        self.requests.drop_all()
        self.delivery.drop()
        for worker_id in self.pool.ids:
            seed = self.pool.gather_one(
                worker_id, "set its seed", CollectorWorker.set_seed, seed, static_seed
            )
        return seed

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the version becomes the larger of the state's and the current one.

        Raises:
            ValueError: the state does not fit the workers; nothing was done.
        """
        self._check(state)
        self.requests.drop_all()
        before = self.weights.version
        self.weights.advance(state["version"])
        self.pool.next_seat = max(self.pool.next_seat, state["seats"])
        ids = self.pool.ids
        if state["workers"]:
            newest = max(state["workers"], key=itemgetter("version"))
            self.weights.begin_with(copy.deepcopy(newest["models"]), newest["version"])
            calls = {
                i: self.pool.request(i, CollectorWorker.load_state_dict, saved)
                for i, saved in zip(ids, state["workers"], strict=True)
            }
        else:
            calls = {
                i: self.pool.request(
                    i,
                    CollectorWorker.start_over,
                    self.pool.take_seat(),
                    before,
                    self.weights.version,
                )
                for i in ids
            }
        gather(calls, self.timeout, "load its state")
        self.random_frames.load_state_dict(state["random_frames"])
        self.delivery.load_state_dict(state["delivery"])
        self.requests.put_back({ids[position]: batch.clone() for position, batch in state["made"]})

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise `ValueError` unless a state fits the workers."""
        if not isinstance(state, Mapping) or "frames_per_worker" not in state:
            raise ValueError("that is not a state of a collector; state_dict() gives one")
        saved = state["frames_per_worker"]
        frames = [worker.frames for worker in self.pool.joined]
        if saved and len(saved) != len(frames):
            raise ValueError(
                f"the state is that of {len(saved)} workers, and the collector has {len(frames)}; "
                f"make it with num_workers={len(saved)}"
            )
        if saved and saved != frames:
            raise ValueError(
                f"the state is that of workers whose batches have {saved} frames, and the "
                f"collector's have {frames}; give it the same frames_per_batch and sync"
            )
        calls = {
            worker_id: self.pool.request(worker_id, CollectorWorker.check_state_dict, worker)
            for worker_id, worker in zip(self.pool.ids, state["workers"], strict=False)
        }
        try:
            gather(calls, self.timeout, "compare its models with those of the state")
        except RemoteCallError as error:
            raise ValueError(f"the state is that of other models: {error}") from error
