"""The loop over steps that works with every environment: it speaks TensorDict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase

from sync_core.collector.columns import Columns, Leaves, leaves_of
from sync_core.collector.policies import TensorDictPolicy
from sync_core.envs.protocol import Env, optional


@dataclass(frozen=True, slots=True)
class Steps:
    """What a loop gathered; time is the last batch dimension.

    Args:
        root: what the policy saw and did, by key.
        next: what came of it, by key.
    """

    root: Leaves
    next: Leaves


class Loop(Protocol):
    """Steps an environment, and begins a new episode where one has ended."""

    def observation_keys(self) -> list[Any]:
        """What the environment observes."""

    def run(self, steps: int, policy: Any) -> Steps:
        """Go on for some steps; None as the policy means random actions."""

    def restart(self) -> None:
        """Begin the next run with a reset."""


class TensorDictLoop:
    """Steps an environment by its TensorDict methods.

    Args:
        env: any environment.
    """

    def __init__(self, env: Env) -> None:
        self._env = env
        self._step: Callable[[TensorDictBase], tuple[TensorDictBase, TensorDictBase]] = (
            optional(env, "step_and_maybe_reset") or self._step_then_reset
        )
        self._not_observed: set[Any] = {*_keys(env, "done"), "done", "terminated", "truncated"}
        self._rewards = _keys(env, "reward")
        self._root: TensorDictBase | None = None

    def observation_keys(self) -> list[Any]:
        """The keys that a reset gives, flags apart."""
        return [key for key in leaves_of(self._begin()) if key not in self._not_observed]

    def restart(self) -> None:
        """Begin the next run with a reset."""
        self._root = None

    def run(self, steps: int, policy: TensorDictPolicy | None) -> Steps:
        """Go on for some steps; None as the policy means random actions."""
        act = policy or random_policy(self._env)
        root, following = Columns(), Columns()
        current = self._begin()
        for _ in range(steps):
            current = act(current)
            # Recorded before the step, since environments may change their tensors in place.
            root.append(leaves_of(current))
            current, self._root = self._step(current)
            following.append(leaves_of(current["next"]))
            current = self._root
        time = len(self._env.batch_size)
        return Steps(root.stack(time), following.stack(time))

    def _begin(self) -> TensorDictBase:
        if self._root is None:
            self._root = self._env.reset()
        return self._root

    def _step_then_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        td = self._env.step(td)
        root = td["next"].exclude(*self._rewards)
        done = root["done"]
        if not done.any():
            return td, root
        if done.all():
            return td, self._env.reset()
        mask = done.reshape(self._env.batch_size)
        fresh = self._env.reset(TensorDict({"_reset": done}, batch_size=self._env.batch_size))
        for key, new in leaves_of(fresh).items():
            old = root.get(key, None)
            where = mask.reshape(mask.shape + (1,) * (new.ndim - mask.ndim))
            root.set(key, new if old is None else torch.where(where, new, old))
        return td, root


def random_policy(env: Env) -> TensorDictPolicy:
    """The policy of random actions.

    Raises:
        TypeError: the environment has no way to make one.
    """
    rand_action: TensorDictPolicy | None = optional(env, "rand_action")
    if rand_action is not None:
        return rand_action
    spec: Any = optional(env, "action_spec")
    if spec is None:
        raise TypeError(
            f"{type(env).__name__} has neither rand_action(td) nor action_spec, so there are no "
            "random actions; write one of them, or give the collector a policy"
        )
    return lambda tensordict: tensordict.set("action", spec.rand())


def action_key(env: Env) -> Any:
    """The key under which the environment looks for the action."""
    return _keys(env, "action")[0]


def _keys(env: Env, kind: str) -> list[Any]:
    declared: Any = optional(env, f"{kind}_keys")
    return list(declared or [kind])
