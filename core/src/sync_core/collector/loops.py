"""The loop over steps that works with every environment: it speaks TensorDict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from sync_core.collector.columns import Leaves, copy_of, leaves_of, stack
from sync_core.collector.policies import TensorDictPolicy
from sync_core.envs.normal import Conventions
from sync_core.envs.protocol import Env, optional

#: Called before every step; gives the version of the policy that is about to act.
BetweenSteps: TypeAlias = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Steps:
    """What a loop gathered; time is the last batch dimension.

    Args:
        root: what the policy saw and did, by key.
        next: what came of it, by key.
        ended: after which steps an episode was over.
        versions: the version of the policy that acted in each step.
    """

    root: Leaves
    next: Leaves
    ended: Tensor
    versions: Tensor


class Loop(Protocol):
    """Steps an environment, and begins a new episode where one has ended.

    A run that was cut short, by Ctrl-C or an error, is gone on with by the next one: what it
    gathered is kept here.
    """

    def observation_keys(self) -> list[Any]:
        """What the environment observes."""

    def run(self, steps: int, policy: Any, between_steps: BetweenSteps) -> Steps:
        """Go on for some steps; None as the policy means random actions."""

    def restart(self) -> None:
        """Begin the next run with a reset, and drop what one that was cut short has gathered."""


@dataclass(frozen=True, slots=True)
class _Acted:
    """A step whose action is chosen, and that is still to be made."""

    tensordict: TensorDictBase
    root: Leaves
    version: int


class TensorDictLoop:
    """Steps an environment by its TensorDict methods.

    Args:
        env: any environment.
    """

    def __init__(self, env: Env) -> None:
        self._env = env
        self._conventions = Conventions(env)
        self._step_and_reset: Callable[[TensorDictBase], Any] | None = optional(
            env, "step_and_maybe_reset"
        )
        self.restart()

    def observation_keys(self) -> list[Any]:
        """The keys that a reset gives, flags apart."""
        flags = self._conventions.flag_keys
        return [key for key in leaves_of(self._begin()) if key not in flags]

    def restart(self) -> None:
        """Begin the next run with a reset, and drop what one that was cut short has gathered."""
        self._root: TensorDictBase | None = None
        self._acted: _Acted | None = None
        self._stepped: TensorDictBase | None = None
        self._frames: list[tuple[Leaves, Leaves, int]] = []

    def run(
        self, steps: int, policy: TensorDictPolicy | None, between_steps: BetweenSteps
    ) -> Steps:
        """Go on for some steps; None as the policy means random actions."""
        act = policy or random_policy(self._env, self._conventions.action_key)
        while len(self._frames) < steps:
            self._step(act, between_steps)
        roots, outcomes, versions = zip(*self._frames, strict=True)
        time = len(self._env.batch_size)
        outcome = self._conventions.outcome(stack(outcomes, time), time + 1)
        root = self._conventions.root(stack(roots, time), outcome, time + 1)
        ended = self._conventions.ended(outcome, time + 1)
        made = Steps(root, outcome, ended, torch.tensor(versions))
        self._frames = []
        return made

    def _step(self, act: TensorDictPolicy, between_steps: BetweenSteps) -> None:
        if self._acted is None:
            version = between_steps()
            acted = act(self._begin())
            # Copied before the step, since environments may change their tensors in place.
            self._acted = _Acted(acted, copy_of(leaves_of(acted)), version)
        acted = self._acted.tensordict
        if self._step_and_reset is None:
            stepped, root = self._env.step(acted), None
        else:
            stepped, root = self._step_and_reset(acted)
        frame = self._acted.root, copy_of(leaves_of(stepped["next"])), self._acted.version
        self._acted, self._root, self._stepped = None, root, stepped
        self._frames.append(frame)

    def _begin(self) -> TensorDictBase:
        if self._root is None:
            stepped = self._stepped
            self._root = self._env.reset() if stepped is None else self._root_after(stepped)
        return self._root

    def _root_after(self, stepped: TensorDictBase) -> TensorDictBase:
        following = stepped["next"]
        root: TensorDictBase = following.exclude(*self._conventions.reward_keys)
        mask = self._conventions.ended_now(following)
        if not mask.any():
            return root
        if mask.all():
            return self._env.reset()
        which = TensorDict({"_reset": mask.unsqueeze(-1)}, batch_size=self._env.batch_size)
        for key, new in leaves_of(self._env.reset(which)).items():
            old = root.get(key, None)
            where = mask.reshape(mask.shape + (1,) * (new.ndim - mask.ndim))
            root.set(key, new if old is None else torch.where(where, new, old))
        return root


def random_policy(env: Env, action_key: Any = "action") -> TensorDictPolicy:
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
    return lambda tensordict: tensordict.set(action_key, spec.rand())
