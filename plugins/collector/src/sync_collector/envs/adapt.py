"""Makes environments for a collector: of Gymnasium's, and of several as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, stack

from sync_collector.envs.arrays import (
    ArrayEnv,
    Arrays,
    ArrayStep,
    check_flags,
    put_row,
    speaks_arrays,
)
from sync_collector.envs.gym import GymEnv
from sync_collector.envs.infos import InfoKeys
from sync_collector.envs.normal import Conventions
from sync_collector.envs.protocol import (
    Env,
    close_env,
    following_of,
    load_env,
    optional,
    random_policy,
    reset_env,
    save_env,
    seed_env,
)


def stack_envs(envs: Sequence[Env]) -> Env:
    """One environment, whose batch has a dimension for those given before their own.

    Args:
        envs: one or more, all of one kind.

    Raises:
        ValueError: their batches or observations differ.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> stack_envs([CountingEnv(), CountingEnv()]).reset()["observation"]
        tensor([[0.],
                [0.]])
    """
    if len({tuple(env.batch_size) for env in envs}) > 1:
        raise ValueError(
            f"environments of one worker have the batch sizes "
            f"{[list(env.batch_size) for env in envs]}; make them alike"
        )
    arrays = [env for env in envs if speaks_arrays(env)]
    if len(arrays) == len(envs):
        return _ArrayStack(arrays)
    return _TensorDictStack(envs)


class _Members:
    """The calls that any stack makes to each of its environments."""

    _envs: Sequence[Env]
    is_closed = False

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed one after the other, each with the seed that the one before it gave."""
        for env in self._envs:
            seed = seed_env(env, seed, static_seed)
        return seed

    def save_state(self) -> list[Any] | None:
        """The states of all of them; None if one cannot be saved."""
        states = [save_env(env) for env in self._envs]
        return None if any(state is None for state in states) else states

    def load_state(self, states: list[Any]) -> None:
        """Let each continue from its own."""
        for env, state in zip(self._envs, states, strict=True):
            load_env(env, state)

    def close(self) -> None:
        """Close all of them."""
        self.is_closed = True
        for env in self._envs:
            close_env(env)


class _ArrayStack(_Members, ArrayEnv):
    def __init__(self, envs: Sequence[ArrayEnv]) -> None:
        specs = envs[0].array_specs
        for env in envs:
            if env.array_specs != specs:
                raise ValueError(
                    f"environments of one worker observe {dict(specs)} and "
                    f"{dict(env.array_specs)}; make them alike"
                )
        self._envs = self._members = envs
        self.array_specs = specs
        self.batch_size = torch.Size((len(envs), *envs[0].batch_size))

    def reset_arrays(self, mask: np.ndarray[Any, Any] | None = None) -> Arrays:
        rows = self._rows()
        for i, env in enumerate(self._members):
            where = None if mask is None else np.asarray(mask[i])
            if where is None or where.all():
                put_row(rows, i, env.reset_arrays())
            elif where.any():
                put_row(rows, i, env.reset_arrays(where))
        return rows

    def step_arrays(self, action: np.ndarray[Any, Any]) -> ArrayStep:
        rows = self._rows()
        reward = np.empty(self.batch_size, np.float32)
        terminated, truncated = np.empty((2, *self.batch_size), np.bool_)
        for i, env in enumerate(self._members):
            stepped = env.step_arrays(action[i])
            check_flags(env, stepped)
            observation, reward[i], terminated[i], truncated[i] = stepped
            put_row(rows, i, observation)
        return rows, reward, terminated, truncated

    def sample_action(self) -> np.ndarray[Any, Any]:
        return np.stack([env.sample_action() for env in self._members])

    def _rows(self) -> dict[Any, np.ndarray[Any, Any]]:
        return {
            key: np.empty((*self.batch_size, *spec.shape), spec.dtype)
            for key, spec in self.array_specs.items()
        }


class _TensorDictStack(_Members):
    def __init__(self, envs: Sequence[Env]) -> None:
        self._envs = envs
        self.batch_size = torch.Size((len(envs), *envs[0].batch_size))
        self.action_keys = optional(envs[0], "action_keys")
        self.reward_keys = optional(envs[0], "reward_keys")
        self.done_keys = optional(envs[0], "done_keys")
        self._conventions = Conventions(self)

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        where = None if tensordict is None else self._conventions.to_reset(tensordict)
        if tensordict is None or where is None:
            return self._stack([reset_env(env) for env in self._envs])
        which = where.flatten(1).any(1).tolist() if where.ndim > 1 else where.tolist()
        parts = tensordict.unbind(0)
        roots = {
            i: reset_env(env, parts[i]) if self.batch_size[1:] else reset_env(env)
            for i, env in enumerate(self._envs)
            if which[i]
        }
        keys = list(next(iter(roots.values())).keys(include_nested=True, leaves_only=True))
        return self._stack([roots.get(i, part).select(*keys) for i, part in enumerate(parts)])

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        pairs = zip(self._envs, tensordict.unbind(0), strict=True)
        followings = [following_of(env, part, env.step(part)) for env, part in pairs]
        return tensordict.set("next", self._stack(followings))

    def rand_action(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        keys = self._conventions.action_keys
        pairs = zip(self._envs, tensordict.unbind(0), strict=True)
        actions = [random_policy(env, keys[0])(part).select(*keys) for env, part in pairs]
        return tensordict.update(self._stack(actions))

    def _stack(self, parts: Sequence[TensorDictBase]) -> TensorDictBase:
        together: TensorDictBase = stack(list(parts))
        return together


def as_env(made: Any, info_keys: InfoKeys = ()) -> Env:
    """The object itself if it is an `Env`, else an adapter for what Gymnasium knows.

    Its members tell its kind: a ``batch_size`` for an `Env`, such as TorchRL's ``EnvBase``
    or a class of the user's own; the spaces of a vector environment, or of a single one.

    Args:
        made: an environment of any of these kinds.
        info_keys: see `GymEnv`; for those of Gymnasium.

    Raises:
        TypeError: it is not an environment, or has no ``info`` to read from.
        ValueError: it is a batch of no environment.

    Example:
        >>> import gymnasium
        >>> type(as_env(gymnasium.make("CartPole-v1"))).__name__
        'GymEnv'
    """
    env = _adapted(made, info_keys)
    if not env.batch_size.numel():
        raise ValueError(
            f"{type(made).__name__} has the batch size {list(env.batch_size)}, so it "
            "holds no environment; make it with one or more"
        )
    return env


def _adapted(made: Any, info_keys: InfoKeys) -> Env:
    if not (callable(getattr(made, "reset", None)) and callable(getattr(made, "step", None))):
        raise TypeError(
            f"create_env_fn made a {type(made).__name__}, which has no reset() and step(); let it "
            "return an environment"
        )
    # First: environments that wrap another may pass on its spaces too.
    if isinstance(getattr(made, "batch_size", None), torch.Size):
        if info_keys:
            raise TypeError(
                f"info_keys is for environments of Gymnasium, and create_env_fn made a "
                f"{type(made).__name__}; give it to GymEnv(…, info_keys=…), or to what reads "
                "the info of your environment"
            )
        env: Env = made
        return env
    if hasattr(made, "single_action_space"):
        # It imports gymnasium, which is needed for such an environment only.
        from sync_collector.envs.vector import VectorGymEnv, resettable

        return VectorGymEnv(resettable(made), info_keys=info_keys)
    if hasattr(made, "possible_agents"):
        raise TypeError(
            f"{type(made).__name__} is an environment of several agents (PettingZoo), and a "
            "Gymnasium environment has one agent; type torchrl.envs.PettingZooWrapper(env), whose "
            "batches have the agents in groups, or wrap it in a gymnasium.Env that acts for one of "
            "them"
        )
    if hasattr(made, "action_space") and hasattr(made, "observation_space"):
        return GymEnv(lambda: made, info_keys=info_keys)
    raise TypeError(
        f"{type(made).__name__} has no batch_size that is a torch.Size, and no action_space and "
        "observation_space either; write batch_size = torch.Size() for a single environment, or "
        "torch.Size([n]) for n that are stepped together"
    )
