"""Batches of what one policy does in one environment."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from sync_core.collector.array_loop import ArrayLoop, speaks_arrays
from sync_core.collector.loops import Loop, TensorDictLoop
from sync_core.collector.order import Order
from sync_core.collector.policies import adapt
from sync_core.collector.refresh import Refresher
from sync_core.collector.trajectories import TrajectoryIds
from sync_core.envs.normal import Conventions
from sync_core.envs.protocol import Env, optional

_AS_USUAL = Order()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """How a worker makes batches.

    Args:
        frames_per_batch: frames to gather in a batch; for several environments that are stepped
            together, rounded up to a multiple of their number.
        track_policy_version: record the version that acted in each frame.
        owns_process: the worker has a process to itself, whose random state it may seed.
        deliver: what to give instead of a batch that was made; None for the batch itself.
    """

    frames_per_batch: int
    track_policy_version: bool = True
    owns_process: bool = False
    deliver: Callable[[TensorDictBase], TensorDictBase] | None = None


class Rollout:
    """Runs a policy in an environment, batch after batch.

    Args:
        env: the environment.
        policy: the policy; None for random actions.
        seat: a number that no other rollout of the collector has or had; trajectory ids begin
            with it.
        options: how to make batches.

    Example:
        >>> from sync_core.envs import CountingEnv
        >>> rollout = Rollout(CountingEnv(2), None, 0, RolloutOptions(frames_per_batch=3))
        >>> rollout.collect()["next", "observation"].flatten()
        tensor([1., 2., 1.])
    """

    def __init__(self, env: Env, policy: Any, seat: int, options: RolloutOptions) -> None:
        self.refresher = Refresher(policy)
        self._env = env
        self._options = options
        self._ids = TrajectoryIds(seat)
        self._steps = math.ceil(options.frames_per_batch / max(1, env.batch_size.numel()))
        self._loop, self._act = _loop_of(env, policy)
        self._close_env = weakref.finalize(self, _close, env)

    def frames_per_batch(self) -> int:
        """The frames in each batch."""
        return self._steps * self._env.batch_size.numel()

    def collect(self, order: Order = _AS_USUAL) -> TensorDictBase:
        """The next batch; one that was cut short by an exception is gone on with."""
        self.refresher.look()
        act = None if order.random else self._act
        # Not inference_mode: tensors made in it could never be written to by an update.
        with torch.no_grad():
            steps = self._loop.run(self._steps, act, self.refresher.between_steps)
        ids = self._ids.label(steps.ended)
        root = {**steps.root, ("collector", "traj_ids"): ids}
        following = dict(steps.next)
        if self._options.track_policy_version:
            root["policy_version"] = steps.versions.expand(ids.shape).clone()
            following["policy_version"] = root["policy_version"].clone()
        batch = TensorDict({"next": TensorDict(following, ids.shape)}, ids.shape).update(root)
        batch.names = [*[None] * len(self._env.batch_size), "time"]
        deliver = self._options.deliver
        return batch if deliver is None else deliver(batch)

    def set_seed(self, seed: int) -> int:
        """Seed the environment and begin its episodes, and a batch, anew.

        A worker with a process to itself seeds torch, numpy and random too, for its policy.

        Returns:
            The seed for the next worker.
        """
        set_seed = optional(self._env, "set_seed")
        if set_seed is None:
            raise TypeError(f"{type(self._env).__name__} has no set_seed(); write one to seed it")
        if self._options.owns_process:
            seed_process(seed)
        self._loop.restart()
        self._ids.restart()
        return int(set_seed(seed))

    def close(self) -> None:
        """Close the receiver and the environment."""
        self.refresher.close()
        self._close_env()


def seed_process(seed: int) -> None:
    """Seed the random state of this process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (environments and policies may still draw from it)
    random.seed(seed)


def _loop_of(env: Env, policy: Any) -> tuple[Loop, Callable[..., Any] | None]:
    """The loop that suits the environment, and the policy as loops call it."""
    loop: Loop = ArrayLoop(env) if speaks_arrays(env) else TensorDictLoop(env)
    if policy is None:
        return loop, None
    return loop, adapt(policy, loop.observation_keys(), Conventions(env).action_key)


def _close(env: Env) -> None:
    close = optional(env, "close")
    if close is not None and not optional(env, "is_closed"):
        close()
