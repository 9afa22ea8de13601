"""The loop over steps for environments that give arrays, without a TensorDict in each step."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from sync_core.collector.choosers import (
    Chooser,
    RandomChooser,
    Rows,
    TensorChooser,
    TensorDictChooser,
)
from sync_core.collector.columns import Leaves
from sync_core.collector.loops import Steps
from sync_core.collector.policies import TensorDictPolicy, TensorPolicy
from sync_core.envs.arrays import ArrayEnv, Arrays
from sync_core.envs.protocol import FLAGS

_TENSORDICT_METHODS = ("reset", "step", "step_and_maybe_reset", "rand_action")


def speaks_arrays(env: object) -> TypeGuard[ArrayEnv]:
    """Whether stepping an environment by its array methods is the same as by its others."""
    return isinstance(env, ArrayEnv) and all(
        getattr(type(env), name) is getattr(ArrayEnv, name) for name in _TENSORDICT_METHODS
    )


class ArrayLoop:
    """Steps an environment by its array methods.

    Args:
        env: the environment.
    """

    def __init__(self, env: ArrayEnv) -> None:
        self._env = env
        self._batch = tuple(env.batch_size)
        self._current: Arrays | None = None
        self._carried: Leaves = {}

    def observation_keys(self) -> list[Any]:
        """The keys of the environment's specs."""
        return list(self._env.array_specs)

    def restart(self) -> None:
        """Begin the next run with a reset."""
        self._current = None
        self._carried = {}

    def run(self, steps: int, policy: TensorPolicy | TensorDictPolicy | None) -> Steps:
        """Go on for some steps; None as the policy means random actions."""
        # One row more than there are steps: the last is where the next run goes on.
        seen, following = self._rows(steps + 1), self._rows(steps)
        reward = np.empty((steps, *self._batch), np.float32)
        terminated, truncated = np.empty((2, steps, *self._batch), np.bool_)
        chooser = self._chooser(policy, seen)
        step = self._env.step_arrays
        _put(seen, 0, self._env.reset_arrays() if self._current is None else self._current)
        for t in range(steps):
            action = chooser.choose(t).numpy()
            observation, reward[t], terminated[t], truncated[t] = step(action)
            _put(following, t, observation)
            _put(seen, t + 1, observation)
            ended = terminated[t] | truncated[t]
            if ended.any():
                self._reset(seen, t + 1, ended, chooser)
        self._current = {key: rows[steps].copy() for key, rows in seen.items()}
        time = len(self._batch)
        no = torch.zeros(*self._batch, steps, 1, dtype=torch.bool)
        root = {key: self._column(rows[:steps]) for key, rows in seen.items()}
        outcome = {key: self._column(rows) for key, rows in following.items()}
        scalars = {
            "reward": reward,
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
        }
        outcome |= {name: self._column(rows).unsqueeze(-1) for name, rows in scalars.items()}
        return Steps(
            root | {name: no.clone() for name in FLAGS} | chooser.root.stack(time),
            outcome | chooser.next.stack(time),
        )

    def _chooser(self, policy: TensorPolicy | TensorDictPolicy | None, seen: Rows) -> Chooser:
        if policy is None:
            return RandomChooser(self._env)
        if isinstance(policy, TensorPolicy):
            return TensorChooser(policy, seen)
        return TensorDictChooser(policy, seen, self._env.batch_size, self._carried)

    def _rows(self, count: int) -> dict[Any, np.ndarray[Any, Any]]:
        return {
            key: np.empty((count, *self._batch, *spec.shape), spec.dtype)
            for key, spec in self._env.array_specs.items()
        }

    def _reset(self, seen: Rows, t: int, ended: Any, chooser: Chooser) -> None:
        if not self._batch:
            _put(seen, t, self._env.reset_arrays())
            chooser.reset()
            return
        fresh = self._env.reset_arrays(ended)
        for key, rows in seen.items():
            rows[t][ended] = np.asarray(fresh[key])[ended]

    def _column(self, rows: np.ndarray[Any, Any]) -> Tensor:
        """Put time behind the batch dimensions."""
        return torch.from_numpy(rows).movedim(0, len(self._batch)).contiguous()


def _put(rows: Rows, t: int, observation: Arrays) -> None:
    for key, row in rows.items():
        row[t] = observation[key]
