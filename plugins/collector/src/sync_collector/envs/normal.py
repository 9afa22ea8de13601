"""Normalises rewards and flags in a batch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from sync_collector.envs.protocol import FLAGS, Env, optional

Leaves: TypeAlias = dict[Any, Tensor]

#: The key of a request to reset a part of a batch.
RESET = "_reset"


class Conventions:
    """The keys of an environment's action, reward and flags, and their shapes.

    In a batch, rewards are float32 and flags are bool, with a trailing dimension of size 1. The
    flags are ``done``, ``terminated`` and ``truncated``. If an environment returns only ``done``,
    it counts as ``terminated``.

    Args:
        env: the environment. Its ``action_keys``, ``reward_keys`` and ``done_keys`` are used if it
            has them.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> conventions = Conventions(CountingEnv())
        >>> made = {"reward": torch.ones(3, dtype=torch.int64), "done": torch.zeros(3)}
        >>> made = conventions.outcome(made, dims=1)
        >>> made["reward"].dtype, made["truncated"].shape
        (torch.float32, torch.Size([3, 1]))
    """

    def __init__(self, env: Env) -> None:
        self.action_keys: tuple[Any, ...] = tuple(_declared(env, "action"))
        self.action_key: Any = self.action_keys[0]
        self.reward_keys: tuple[Any, ...] = tuple(_declared(env, "reward"))
        self._name = type(env).__name__
        self._batch_dims = len(env.batch_size)
        done_keys = [_path(key) for key in _declared(env, "done")]
        self._groups = tuple(dict.fromkeys(path[:-1] for path in done_keys))
        # If there is a flag of the whole environment, it decides instead of those of its parts.
        self._decisive = ((),) if () in self._groups else self._groups
        #: The keys of the flags that say whether an episode has ended.
        self.decisive_keys = tuple(
            _key((*group, name)) for group in self._decisive for name in FLAGS
        )

    @property
    def flag_keys(self) -> frozenset[Any]:
        """The keys of all flags."""
        return frozenset(_key((*group, name)) for group in self._groups for name in FLAGS)

    def outcome(self, leaves: Mapping[Any, Tensor], dims: int) -> Leaves:
        """Return the outcome of steps, with reward and flags in the normal form.

        Args:
            leaves: the tensors of the environment, by key.
            dims: the number of batch dimensions before those of the values.

        Raises:
            KeyError: no flag says whether an episode has ended.
        """
        made = dict(leaves)
        for key in self.reward_keys:
            if key in made:
                made[key] = _column(made[key], torch.float32, dims)
        for group in self._groups:
            made.update(self._flags(made, group, dims))
        return made

    def root(self, leaves: Mapping[Any, Tensor], outcome: Leaves, dims: int) -> Leaves:
        """Return the observations before steps, with the flags of unfinished episodes.

        An ended part of an environment, whose other parts continue, keeps its own flags.

        Args:
            leaves: the observations, by key.
            outcome: the result of the step.
            dims: see `outcome`.
        """
        made = {**leaves, **{key: torch.zeros_like(outcome[key]) for key in self.flag_keys}}
        for group in self._groups:
            names = [_key((*group, name)) for name in FLAGS]
            if group not in self._decisive and any(name in leaves for name in names):
                made.update(self._flags(leaves, group, dims))
        return made

    def ended(self, leaves: Mapping[Any, Tensor], dims: int) -> Tensor:
        """Return the mask of ended episodes; the flag of any part ends the episode of all parts."""
        ended = [
            self._flags(leaves, group, dims)[_key((*group, "done"))].flatten(dims).any(-1)
            for group in self._decisive
        ]
        return torch.stack(ended).any(0)

    def ended_now(self, following: TensorDictBase) -> Tensor:
        """Return which episodes ended with one step, in the environment's batch shape."""
        given = [following.get(key, None) for key in self.decisive_keys]
        # Called once per step, so this uses as few operations as possible.
        ended = [_whole(flag, self._batch_dims) for flag in given if flag is not None]
        if not ended:
            raise self._without_flags(self._decisive[0])
        return functools.reduce(operator.or_, ended)

    def truncate(self, following: TensorDictBase, where: Tensor) -> None:
        """Set the flags of a truncated episode in the outcome of a step.

        Args:
            following: the outcome, changed in place.
            where: the truncated episodes, in the environment's batch shape.
        """
        given = {key: following.get(key, None) for key in self.flag_keys}
        leaves = {key: value for key, value in given.items() if value is not None}
        for group in self._groups:
            flags = self._flags(leaves, group, self._batch_dims)
            some = next(leaves[key] for key in flags if key in leaves)
            for key, flag in flags.items():
                over = flag if key == _key((*group, "terminated")) else flag | spread(where, flag)
                # In the environment's own shape: a partial reset combines them with the
                # environment's flags.
                following.set(key, over.reshape(leaves.get(key, some).shape))

    def clear(self, root: TensorDictBase, where: Tensor) -> None:
        """Clear the flags in place where a new episode has begun."""
        for key in self.flag_keys:
            flag = root.get(key, None)
            if flag is not None:
                root.set(key, flag.to(torch.bool) & ~spread(where, flag))

    def reset_request(self, root: TensorDictBase, where: Tensor) -> TensorDictBase:
        """Return a TensorDict that asks an environment to reset a part of its batch.

        Args:
            root: the root of the other environments, with flags.
            where: the environments to reset, in the environment's batch shape.
        """
        request: TensorDictBase = root.copy()
        for group in self._decisive:
            names = (_key((*group, name)) for name in FLAGS)
            flag = next(flag for name in names if (flag := root.get(name, None)) is not None)
            column = _column(flag, torch.bool, self._batch_dims)
            request.set(_key((*group, RESET)), spread(where, column).expand_as(column).clone())
        return request

    def to_reset(self, request: TensorDictBase) -> Tensor | None:
        """Return the requested reset mask in the environment's batch shape; None for all."""
        masks = [request.get(_key((*group, RESET)), None) for group in self._decisive]
        given = [mask.flatten(self._batch_dims).any(-1) for mask in masks if mask is not None]
        return torch.stack(given).any(0) if given else None

    def _flags(self, leaves: Mapping[Any, Tensor], group: tuple[str, ...], dims: int) -> Leaves:
        done, terminated, truncated = (
            None if (flag := leaves.get(_key((*group, name)))) is None
            else _column(flag, torch.bool, dims)
            for name in FLAGS
        )  # fmt: skip
        ends = [flag for flag in (done, terminated, truncated) if flag is not None]
        if not ends:
            raise self._without_flags(group)
        over = torch.stack(ends).any(0)
        if terminated is None:
            terminated = over if truncated is None else over & ~truncated
        if truncated is None:
            truncated = over & ~terminated
        flags = zip(FLAGS, (over, terminated, truncated), strict=True)
        return {_key((*group, name)): flag for name, flag in flags}

    def _without_flags(self, group: tuple[str, ...]) -> KeyError:
        wanted = ", ".join(repr(_key((*group, name))) for name in FLAGS)
        return KeyError(f"{self._name} gives none of {wanted} with a step; give one at least")


def outcome_of(reward: Tensor, terminated: Tensor, truncated: Tensor) -> Leaves:
    """Return reward and flags, with a trailing dimension added if the environment omits it."""
    return {
        "reward": reward.to(torch.float32).unsqueeze(-1),
        "done": (terminated | truncated).unsqueeze(-1),
        "terminated": terminated.unsqueeze(-1),
        "truncated": truncated.unsqueeze(-1),
    }


def no_flags(shape: Sequence[int]) -> Leaves:
    """Return the flags of an unfinished episode."""
    return {name: torch.zeros(*shape, 1, dtype=torch.bool, device="cpu") for name in FLAGS}


def spread(where: Tensor, like: Tensor) -> Tensor:
    """Expand a batch mask to as many dimensions as another tensor of the batch."""
    return where.reshape(where.shape + (1,) * (like.ndim - where.ndim))


def _whole(flag: Tensor, dims: int) -> Tensor:
    """Return where any part of a flag is set, without the value dimensions."""
    flag = flag.to(torch.bool)
    if flag.ndim == dims:
        return flag
    return flag.squeeze(-1) if flag.shape[dims:] == (1,) else flag.flatten(dims).any(-1)


def _column(values: Tensor, dtype: torch.dtype, dims: int) -> Tensor:
    return (values.unsqueeze(-1) if values.ndim == dims else values).to(dtype)


def _declared(env: Env, kind: str) -> list[Any]:
    declared: Any = optional(env, f"{kind}_keys")
    return list(declared or [kind])


def _path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _key(path: tuple[str, ...]) -> Any:
    return path[0] if len(path) == 1 else path
