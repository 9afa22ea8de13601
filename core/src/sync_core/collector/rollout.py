"""What a worker hosts: an environment, a copy of the policy, and the receiver that refreshes it."""

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

from sync_core.address import Address
from sync_core.collector.array_loop import ArrayLoop, speaks_arrays
from sync_core.collector.loops import Loop, TensorDictLoop, action_key
from sync_core.collector.policies import adapt
from sync_core.collector.trajectories import TrajectoryIds
from sync_core.envs.protocol import Env, optional
from sync_core.receiver import Receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What the rollouts of a collector have in common.

    Args:
        frames_per_batch: frames to gather in a batch; for several environments that are stepped
            together, rounded up to a multiple of their number.
        track_policy_version: record the version that acted in each frame.
        owns_process: the worker has a process to itself, whose random state it may seed.
    """

    frames_per_batch: int
    track_policy_version: bool = True
    owns_process: bool = False


class Rollout:
    """Runs a policy in an environment, batch after batch.

    Args:
        env: the environment.
        policy: the policy; None for random actions.
        worker_id: the worker that this is in.
        options: what it has in common with other workers.

    Example:
        >>> from sync_core.envs import CountingEnv
        >>> rollout = Rollout(CountingEnv(2), None, 0, RolloutOptions(frames_per_batch=3))
        >>> rollout.collect()["next", "observation"].flatten()
        tensor([1., 2., 1.])
    """

    def __init__(self, env: Env, policy: Any, worker_id: int, options: RolloutOptions) -> None:
        self._env = env
        self._policy = policy
        self._options = options
        self._receiver: Receiver | None = None
        self._ids = TrajectoryIds(worker_id)
        self._steps = math.ceil(options.frames_per_batch / max(1, env.batch_size.numel()))
        self._loop, self._act = _loop_of(env, policy)
        self._close_env = weakref.finalize(self, _close, env)

    def frames_per_batch(self) -> int:
        """The frames in each batch."""
        return self._steps * self._env.batch_size.numel()

    def connect(self, address: Address) -> None:
        """Get the policy's weights from a sender."""
        self._receiver = Receiver(address, self._policy)

    def receive(self, timeout: float) -> int | None:
        """Commit the newest weights, if there are newer ones; see `Receiver.receive`."""
        return None if self._receiver is None else self._receiver.receive(timeout)

    def collect(self) -> TensorDictBase:
        """The next batch, made with the newest weights that have arrived."""
        self.receive(timeout=0)
        # Not inference_mode: tensors made in it could never be written to by an update.
        with torch.no_grad():
            steps = self._loop.run(self._steps, self._act)
        ids = self._ids.label(steps.next["done"].squeeze(-1))
        root = {**steps.root, ("collector", "traj_ids"): ids}
        following = dict(steps.next)
        if self._options.track_policy_version:
            version = 0 if self._receiver is None else self._receiver.version
            root["policy_version"] = torch.full_like(ids, version)
            following["policy_version"] = root["policy_version"].clone()
        batch = TensorDict({"next": TensorDict(following, ids.shape)}, ids.shape).update(root)
        batch.names = [*[None] * len(self._env.batch_size), "time"]
        return batch

    def set_seed(self, seed: int) -> int:
        """Seed the environment and begin its episodes anew.

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
        if self._receiver is not None:
            self._receiver.close()
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
    return loop, adapt(policy, loop.observation_keys(), action_key(env))


def _close(env: Env) -> None:
    close = optional(env, "close")
    if close is not None and not optional(env, "is_closed"):
        close()
