"""Environments that several tests of the collector step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from sync_collector.envs import ArrayEnv, ArraySpec, CountingEnv


class ArrayCounting(ArrayEnv):
    """`CountingEnv`, by arrays that it overwrites."""

    array_specs = {"observation": ArraySpec((1,), np.dtype(np.float32))}

    def __init__(self, max_steps: Any = 5, num_envs: int | None = None) -> None:
        self.batch_size = torch.Size(() if num_envs is None else (num_envs,))
        self._limits = np.broadcast_to(np.asarray(max_steps), self.batch_size)
        self._steps = np.zeros((*self.batch_size, 1), np.float32)

    def reset_arrays(self, mask: Any = None) -> dict[str, Any]:
        self._steps[... if mask is None else mask] = 0
        return {"observation": self._steps}

    def step_arrays(self, action: Any) -> tuple[Any, Any, Any, Any]:
        self._steps += 1
        ended = self._steps[..., 0] >= self._limits
        return {"observation": self._steps}, action[..., 0], ended, np.zeros_like(ended)


class Slow(CountingEnv):
    """Takes 20 ms for a step."""

    def __init__(self) -> None:
        super().__init__(100_000)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        time.sleep(0.02)
        return super().step(tensordict)
