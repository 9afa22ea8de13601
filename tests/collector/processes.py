"""Environments and helpers of tests whose workers are processes."""

from __future__ import annotations

import os
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from tensordict import TensorDictBase

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.testing import Scale, long_episodes
from sync_testing import descendants


class Pid(CountingEnv):
    """Knows the id of its process."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.pid = os.getpid()


def versions(batch: TensorDictBase) -> list[int]:
    return list(batch["policy_version"].flatten().tolist())


def kill(made: Collector, worker_id: int) -> None:
    """Kill the process that steps a `Pid`, and wait for its end."""
    pids = dict(zip(made.worker_ids, made.cascade_execute("env.pid"), strict=True))
    process = psutil.Process(pids[worker_id])
    assert process.pid in descendants()
    process.kill()
    process.wait(10)


def collector(env: Any = long_episodes, policy: Any = None, **options: Any) -> Collector:
    options = {"scheme": "thread", "workers": "inline", "frames_per_batch": 4, **options}
    return Collector(env, policy, **options)


MODELS: list[dict[str, Any]] = [
    {"scheme": "shm"},
    {
        "scheme": None,
        "weight_sync_schemes": {"policy": "shm", "critic": "shm"},
        "models": {"critic": Scale()},
    },
]


class Renaming(Scale):
    """Has another name for its weight in its state_dict."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}w"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}w"])
