"""Whatever a user's function made, as an environment for a collector."""

from __future__ import annotations

from typing import Any

import torch

from sync_collector.envs.gym import GymEnv
from sync_collector.envs.protocol import Env


def as_env(made: Any) -> Env:
    """The object itself if it is an `Env`, else an adapter for what Gymnasium knows.

    What it is shows in its members: a ``batch_size`` for an `Env`, such as TorchRL's ``EnvBase``
    or a class of the user's own; the spaces of a vector environment, or of a single one.

    Args:
        made: an environment of any of these kinds.

    Raises:
        TypeError: it is none of them.
        ValueError: it is a batch of no environment.

    Example:
        >>> import gymnasium
        >>> type(as_env(gymnasium.make("CartPole-v1"))).__name__
        'GymEnv'
    """
    env = _adapted(made)
    if not env.batch_size.numel():
        raise ValueError(
            f"{type(made).__name__} has the batch size {list(env.batch_size)}, which is no "
            "environment at all; make it with one or more"
        )
    return env


def _adapted(made: Any) -> Env:
    if not (callable(getattr(made, "reset", None)) and callable(getattr(made, "step", None))):
        raise TypeError(
            f"create_env_fn made a {type(made).__name__}, which has no reset() and step(); let it "
            "return an environment"
        )
    # First: environments that wrap another may pass on its spaces too.
    if isinstance(getattr(made, "batch_size", None), torch.Size):
        env: Env = made
        return env
    if hasattr(made, "single_action_space"):
        # It imports gymnasium, which nobody needs without such an environment.
        from sync_collector.envs.vector import VectorGymEnv

        return VectorGymEnv(made)
    if hasattr(made, "action_space") and hasattr(made, "observation_space"):
        return GymEnv(lambda: made)
    raise TypeError(
        f"{type(made).__name__} has no batch_size that is a torch.Size, and no action_space and "
        "observation_space either; write batch_size = torch.Size() for a single environment, or "
        "torch.Size([n]) for n that are stepped together"
    )
