"""Environments of Gymnasium that several tests step, and a policy for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from sync_collector.rollout import Rollout, RolloutOptions


class Count(gymnasium.Env[Any, Any]):
    """Observes how many steps its episode has, and ends after some."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self._length = length
        self._steps = 0
        self.closed = False

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        seen = np.full(1, self._steps, np.float32)
        return seen, float(action), self._steps >= self._length, False, {}

    def close(self) -> None:
        self.closed = True


class Dicts(Count):
    """The same with an observation in parts, one of them discrete."""

    observation_space = gymnasium.spaces.Dict(  # type: ignore[assignment]
        {
            "count": gymnasium.spaces.Box(0, 100, (1,), np.float32),
            "odd": gymnasium.spaces.Discrete(2),
        }
    )

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._parts(super().reset(seed=seed)[0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, *rest = super().step(action)
        return (self._parts(seen), *rest)  # type: ignore[return-value]

    def _parts(self, seen: Any) -> dict[str, Any]:
        return {"count": seen, "odd": self._steps % 2}


class Left(nn.Module):
    """Chooses the first of two actions, everywhere."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.tensor([1, 0]).expand(*observation.shape[:-1], 2)


def collect(env: Any, policy: Any, frames: int, **options: Any) -> TensorDictBase:
    return Rollout(env, policy, 0, RolloutOptions(frames_per_batch=frames, **options)).collect()


def three(count: type[Count] = Count) -> list[Callable[[], Count]]:
    return [lambda: count(2), lambda: count(3), lambda: count(100)]
