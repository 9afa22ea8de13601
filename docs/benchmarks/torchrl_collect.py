"""Times TorchRL's collectors with the measurements of `sync_collector.bench.measure`.

Written against torchrl 0.14.1. Policy, frames per batch and updates are the same, with one torch
thread in each worker, as in ours.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import GymEnv

from sync_collector.bench.training import BenchPolicy

_WARM_UP = 2
_BATCHES = 3


def measure(
    env: str, mode: str, *, scheme: str, workers: int, frames_per_batch: int, rounds: int
) -> list[float]:
    """Return frames per second by round, in a mode of `sync_collector.bench.measure.MODES`.

    With the scheme ``"ray"``, workers are Ray actors, as in our collector.
    """
    policy = TensorDictModule(BenchPolicy(env), in_keys=["observation"], out_keys=["action"])
    make = partial(GymEnv, env)
    options: dict[str, Any] = {"frames_per_batch": frames_per_batch, "total_frames": -1}
    collector: Any
    if mode == "single":
        collector = Collector(make, policy, **options)
    elif scheme == "ray":
        collector = RayCollector(
            [make] * workers,
            policy,
            sync=mode == "sync",
            remote_configs={"num_cpus": 1, "num_gpus": 0},
            # TorchRL's collector uses -1 for none.
            **options | {"total_frames": 10**9},
        )
    else:
        kind = MultiSyncCollector if mode == "sync" else MultiAsyncCollector
        collector = kind([make] * workers, policy, num_threads=1, num_sub_threads=1, **options)
    speeds = []
    try:
        batches = iter(collector)
        for _ in range(_WARM_UP + rounds):
            begin = time.perf_counter()
            frames = sum(next(batches).numel() for _ in range(_BATCHES))
            collector.update_policy_weights_()
            speeds.append(frames / (time.perf_counter() - begin))
    finally:
        collector.shutdown()
    return speeds[_WARM_UP:]
