"""How reward and flags look in a batch, whatever an environment makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from sync_core.envs.protocol import FLAGS, Env, optional

Leaves: TypeAlias = dict[Any, Tensor]


class Conventions:
    """What an environment calls its action, rewards and flags, and how they are to look.

    In a batch, a reward is float32 and a flag bool, both with a trailing dimension of size 1, and
    ``done``, ``terminated`` and ``truncated`` are all there. Where an environment gives only
    ``done``, that is ``terminated``.

    Args:
        env: the environment; its ``action_keys``, ``reward_keys`` and ``done_keys`` count where it
            has them.

    Example:
        >>> from sync_core.envs import CountingEnv
        >>> conventions = Conventions(CountingEnv())
        >>> made = {"reward": torch.ones(3, dtype=torch.int64), "done": torch.zeros(3)}
        >>> made = conventions.outcome(made, dims=1)
        >>> made["reward"].dtype, made["truncated"].shape
        (torch.float32, torch.Size([3, 1]))
    """

    def __init__(self, env: Env) -> None:
        self.action_key: Any = _declared(env, "action")[0]
        self.reward_keys: tuple[Any, ...] = tuple(_declared(env, "reward"))
        self._name = type(env).__name__
        self._batch_dims = len(env.batch_size)
        done_keys = [_path(key) for key in _declared(env, "done")]
        self._groups = tuple(dict.fromkeys(path[:-1] for path in done_keys))
        # A flag of the whole environment tells more than those of its parts.
        self._decisive = ((),) if () in self._groups else self._groups

    @property
    def flag_keys(self) -> frozenset[Any]:
        """The keys of all flags."""
        return frozenset(_key((*group, name)) for group in self._groups for name in FLAGS)

    def outcome(self, leaves: Mapping[Any, Tensor], dims: int) -> Leaves:
        """What came of steps, with reward and flags as they are to be.

        Args:
            leaves: what the environment gave, by key.
            dims: how many dimensions come before those of the values.

        Raises:
            KeyError: there is no flag that says whether an episode has ended.
        """
        made = dict(leaves)
        for key in self.reward_keys:
            if key in made:
                made[key] = _column(made[key], torch.float32, dims)
        for group in self._groups:
            made.update(self._flags(made, group, dims))
        return made

    def root(self, leaves: Mapping[Any, Tensor], outcome: Leaves, dims: int) -> Leaves:
        """What was seen before steps, with the flags that their outcome has."""
        made = dict(leaves)
        for key in self.flag_keys:
            given = made.get(key)
            made[key] = (
                torch.zeros_like(outcome[key])
                if given is None
                else _column(given, torch.bool, dims)
            )
        return made

    def ended(self, leaves: Mapping[Any, Tensor], dims: int) -> Tensor:
        """Where an episode has ended, by an outcome; a flag of some part ends it for all parts."""
        ended = [
            self._flags(leaves, group, dims)[_key((*group, "done"))].flatten(dims).any(-1)
            for group in self._decisive
        ]
        return torch.stack(ended).any(0)

    def ended_now(self, following: TensorDictBase) -> Tensor:
        """Where an episode has ended with one step; of the shape of the environment's batch."""
        names = (_key((*group, name)) for group in self._decisive for name in FLAGS)
        given = {name: following.get(name, None) for name in names}
        leaves = {name: value for name, value in given.items() if value is not None}
        return self.ended(leaves, self._batch_dims)

    def _flags(self, leaves: Mapping[Any, Tensor], group: tuple[str, ...], dims: int) -> Leaves:
        done, terminated, truncated = (
            None if (flag := leaves.get(_key((*group, name)))) is None
            else _column(flag, torch.bool, dims)
            for name in FLAGS
        )  # fmt: skip
        ends = [flag for flag in (done, terminated, truncated) if flag is not None]
        if not ends:
            wanted = ", ".join(repr(_key((*group, name))) for name in FLAGS)
            raise KeyError(f"{self._name} gives none of {wanted} with a step; give one at least")
        over = torch.stack(ends).any(0)
        if terminated is None:
            terminated = over if truncated is None else over & ~truncated
        if truncated is None:
            truncated = over & ~terminated
        flags = zip(FLAGS, (over, terminated, truncated), strict=True)
        return {_key((*group, name)): flag for name, flag in flags}


def outcome_of(reward: Tensor, terminated: Tensor, truncated: Tensor) -> Leaves:
    """Reward and flags of an environment that gives them without a trailing dimension."""
    return {
        "reward": reward.to(torch.float32).unsqueeze(-1),
        "done": (terminated | truncated).unsqueeze(-1),
        "terminated": terminated.unsqueeze(-1),
        "truncated": truncated.unsqueeze(-1),
    }


def no_flags(shape: Sequence[int]) -> Leaves:
    """The flags of an episode that goes on."""
    return {name: torch.zeros(*shape, 1, dtype=torch.bool) for name in FLAGS}


def _column(values: Tensor, dtype: torch.dtype, dims: int) -> Tensor:
    return (values.unsqueeze(-1) if values.ndim == dims else values).to(dtype)


def _declared(env: Env, kind: str) -> list[Any]:
    declared: Any = optional(env, f"{kind}_keys")
    return list(declared or [kind])


def _path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _key(path: tuple[str, ...]) -> Any:
    return path[0] if len(path) == 1 else path
