"""A collector whose workers are updated, and what its batches tell."""

from __future__ import annotations

from typing import Any

from sync_collector import Collector
from sync_collector.testing import long_episodes
from sync_core import ApplyContext, hookimpl


def collector(policy: Any = None, **options: Any) -> Collector:
    options = {
        "scheme": "thread",
        "workers": "thread",
        "num_workers": 2,
        "frames_per_batch": 4,
        "timeout": 20.0,
        **options,
    }
    return Collector(long_episodes, policy, **options)


def acted(batch: Any) -> list[float]:
    """Return the actions of a batch, in their order, each once."""
    return sorted(batch["action"].unique().tolist())


def owner(batch: Any) -> int:
    """Return the seat of the worker that made a batch."""
    return int(batch["collector", "traj_ids"][0]) >> 32


class Refuses:
    """Lets worker 0 refuse the policy's weights, once."""

    def __init__(self, commits: int = 1) -> None:
        self.left = commits

    @hookimpl(wrapper=True)
    def apply_weights(self, context: ApplyContext) -> Any:
        if (context.worker_id, context.model_id) == (0, "policy"):
            self.left -= 1
            if self.left == 0:
                raise ValueError("not these")
        return (yield)
