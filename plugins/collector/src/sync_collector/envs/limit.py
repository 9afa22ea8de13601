"""Truncates episodes after a number of steps, in any environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from sync_collector.envs.arrays import ArrayEnv, Arrays, ArraySpec, ArrayStep, speaks_arrays
from sync_collector.envs.normal import Conventions
from sync_collector.envs.protocol import Env, following_of, load_env, reset_env, save_env

#: The key of the number of steps since the last reset.
STEP_COUNT = "step_count"


def limit_frames(env: Env, max_frames: int) -> Env:
    """Wrap an environment: episodes are truncated after ``max_frames`` steps.

    The steps are counted under ``"step_count"``.

    Args:
        env: any environment.
        max_frames: the most steps of an episode.

    Raises:
        ValueError: the environment has its own ``"step_count"``; raised at the first reset if its
            specs do not show it.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> env = limit_frames(CountingEnv(5), 1)
        >>> td = env.step(env.reset().set("action", torch.ones(1)))
        >>> td["next", "truncated"], td["next", "step_count"]
        (tensor([True]), tensor([1]))
    """
    if speaks_arrays(env):
        return _LimitedArrays(env, max_frames)
    return _LimitedTensorDicts(env, max_frames)


class _LimitedArrays(ArrayEnv):
    def __init__(self, env: ArrayEnv, max_frames: int) -> None:
        if STEP_COUNT in env.array_specs:
            raise _taken(env)
        self._env = env
        self._max_frames = max_frames
        self._count = np.zeros((*env.batch_size, 1), np.int64)
        self.batch_size = env.batch_size
        self.array_specs = {
            **env.array_specs,
            STEP_COUNT: ArraySpec((1,), np.dtype(np.int64)),
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset_arrays(self, mask: np.ndarray[Any, Any] | None = None) -> Arrays:
        self._count[... if mask is None else mask] = 0
        return {**self._env.reset_arrays(mask), STEP_COUNT: self._count}

    def step_arrays(self, action: np.ndarray[Any, Any]) -> ArrayStep:
        observation, reward, terminated, truncated = self._env.step_arrays(action)
        self._count += 1
        over = self._count[..., 0] >= self._max_frames
        return {**observation, STEP_COUNT: self._count}, reward, terminated, truncated | over

    def sample_action(self) -> np.ndarray[Any, Any]:
        return self._env.sample_action()

    def save_state(self) -> Any:
        state = save_env(self._env)
        return None if state is None else (state, self._count.copy())

    def load_state(self, state: Any) -> None:
        inner, count = state
        load_env(self._env, inner)
        self._count = count.copy()


class _LimitedTensorDicts:
    #: Hidden, since it would reset before the limit is checked; the caller resets.
    step_and_maybe_reset = None

    def __init__(self, env: Env, max_frames: int) -> None:
        self._env = env
        self._max_frames = max_frames
        self._conventions = Conventions(env)
        device = getattr(env, "device", None) or "cpu"
        self._count = torch.zeros(*env.batch_size, 1, dtype=torch.int64, device=device)
        self.batch_size = env.batch_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        where = None if tensordict is None else self._conventions.to_reset(tensordict)
        if where is None:
            root = reset_env(self._env)
            if STEP_COUNT in root.keys():  # noqa: SIM118 (a TensorDict's own `in` is deprecated)
                raise _taken(self._env)
            self._count = torch.zeros_like(self._count)
        else:
            root = reset_env(self._env, tensordict)
            self._count = torch.where(where.unsqueeze(-1), 0, self._count)
        # Copied: an environment that keeps its TensorDict would return the values set here and
        # below.
        return root.copy().set(STEP_COUNT, self._count)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        stepped = self._env.step(tensordict)
        # Checked before the copy: only a TensorDict can be copied.
        following_of(self._env, tensordict, stepped)
        stepped = stepped.copy()
        self._count = self._count + 1
        following = stepped["next"]
        over = self._count.squeeze(-1) >= self._max_frames
        self._conventions.truncate(following, over.to(following.device))
        following.set(STEP_COUNT, self._count)
        return stepped

    def save_state(self) -> Any:
        state = save_env(self._env)
        return None if state is None else (state, self._count)

    def load_state(self, state: Any) -> None:
        inner, self._count = state
        load_env(self._env, inner)


def _taken(env: Env) -> ValueError:
    return ValueError(
        f"{type(env).__name__} has a {STEP_COUNT!r} of its own, and max_frames_per_traj counts "
        "under that name; leave it out, and let the environment end its episodes"
    )
