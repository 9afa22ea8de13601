"""Measures how fast a collector is here, and its weight updates beside those of others."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sync_collector import Collector
from sync_collector.bench.by_hand import measure_by_hand
from sync_collector.bench.training import BenchPolicy, torch_threads, train
from sync_collector.envs import GymEnv
from sync_core.bench import check_measurable, measure

#: What workers do: one in the trainer's process, or several that make each batch together, or
#: several that each make their own.
MODES = ("single", "sync", "first-ready")

_WARM_UP = 2
_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorMeasurement:
    """What one run measured.

    Args:
        env: the environment's id.
        mode: one of `MODES`.
        scheme: the scheme's name.
        workers: how many there were.
        frames_per_second: of each round: frames over seconds, the round's update included.
        sync_seconds: of each `update_policy_weights_` after training on a batch, which waits until
            all workers have committed the weights.
        refresh_seconds: what each refresh that a collector does by itself, with
            ``update_after_each_batch``, kept the training loop from going on.
        by_hand_seconds: of each update in such a loop that was written without a collector; see
            `measure_by_hand`.
        bare_seconds: rounds of a bare sender with a model of that size, and as many workers, which
            do nothing but wait.
    """

    env: str
    mode: str
    scheme: str
    workers: int
    frames_per_second: list[float]
    sync_seconds: list[float]
    refresh_seconds: list[float]
    by_hand_seconds: list[float]
    bare_seconds: list[float]


def measure_collector(
    env: str,
    mode: str,
    *,
    scheme: str = "shm",
    workers: int = 2,
    frames_per_batch: int = 1000,
    rounds: int = 7,
    threads: int = 1,
) -> CollectorMeasurement:
    """Collect batch after batch, with an update after every third of them; then train as well.

    Trains with updates that are waited for, and once more with a collector that refreshes its
    workers by itself.

    Args:
        env: one of `ENVS`.
        mode: one of `MODES`.
        scheme: the scheme's name.
        workers: how many; a single one is alone.
        frames_per_batch: the frames of a batch.
        rounds: how many rounds of three batches count, and of training, after two that do not.
        threads: of torch's in the trainer that trains. For so small a policy a second one has
            nothing to do, and spins for milliseconds on a core that a worker needs.

    Raises:
        SyncError: the scheme does not work here.
    """
    check_measurable(scheme)
    single = mode == "single"
    workers = 1 if single else workers
    options: dict[str, Any] = {
        "scheme": scheme,
        "workers": "inline" if single else None,
        "num_workers": workers,
        "frames_per_batch": frames_per_batch,
        "sync": mode == "sync",
    }
    speeds: list[float] = []
    updates: list[float] = []
    refreshes: list[float] = []
    policy = BenchPolicy(env)
    optimizer = torch.optim.Adam(policy.parameters())
    with Collector(partial(GymEnv, env), policy, **options) as collector:
        for _ in range(_WARM_UP + rounds):
            begin = time.perf_counter()
            frames = sum(next(collector).numel() for _ in range(_BATCHES))
            collector.update_policy_weights_()
            speeds.append(frames / (time.perf_counter() - begin))
        with torch_threads(threads):
            for _ in range(_WARM_UP + rounds):
                train(policy, optimizer, next(collector)["observation"].flatten(0, -2))
                begin = time.perf_counter()
                collector.update_policy_weights_()
                updates.append(time.perf_counter() - begin)
    options["update_after_each_batch"] = True
    with Collector(partial(GymEnv, env), policy, **options) as collector, torch_threads(threads):
        for _ in range(_WARM_UP + rounds):
            train(policy, optimizer, next(collector)["observation"].flatten(0, -2))
            refreshes.append(collector.stats().sync_seconds)
    by_hand = measure_by_hand(
        env,
        mode,
        scheme=scheme,
        workers=workers,
        frames_per_batch=frames_per_batch,
        rounds=rounds,
        threads=threads,
    )
    bare = measure(scheme, "small", workers=workers, rounds=rounds)
    return CollectorMeasurement(
        env=env,
        mode=mode,
        scheme=scheme,
        workers=workers,
        frames_per_second=speeds[_WARM_UP:],
        sync_seconds=updates[_WARM_UP:],
        refresh_seconds=refreshes[_WARM_UP:],
        by_hand_seconds=by_hand,
        bare_seconds=bare.seconds,
    )
