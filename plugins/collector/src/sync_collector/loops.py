"""The loop over steps that works with every environment, and the stacking of what steps gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

from sync_collector.envs.normal import RESET, Conventions, spread
from sync_collector.envs.protocol import Env, following_of, optional, random_policy, reset_env
from sync_collector.policies import TensorDictPolicy

Leaves: TypeAlias = dict[Any, Tensor]


def leaves_of(tensordict: TensorDictBase) -> Leaves:
    """The tensors of a TensorDict by key, without what is under ``"next"``.

    Raises:
        TypeError: an entry that is not a tensor.
    """
    leaves: Leaves = {}
    items = tensordict.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    for key, value in items:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{key!r} is a {type(value).__name__}; a collector gathers tensors only, so leave "
                "it out, or give its number"
            )
        if isinstance(key, str) or key[0] != "next":
            leaves[key] = value
    return leaves


def recorded_of(tensordict: TensorDictBase) -> Leaves:
    """Return the leaves of a batch, private ones (with an underscore) apart."""
    leaves = leaves_of(tensordict)
    return {key: tensor for key, tensor in leaves.items() if not _is_private(key)}


@lru_cache(maxsize=1024)
def _is_private(key: str | tuple[str, ...]) -> bool:
    return any(name.startswith("_") for name in ((key,) if isinstance(key, str) else key))


def copy_of(leaves: Leaves) -> Leaves:
    """The tensors of one step, to be kept: the next step may overwrite the originals."""
    return {key: tensor.clone() for key, tensor in leaves.items()}


class Copies:
    """Copies of the tensors of steps, each tensor once.

    The next step begins with the result of the last one: often the very same tensors.

    Example:
        >>> copies, given = Copies(), {"observation": torch.zeros(1)}
        >>> copies.of(given)["observation"] is copies.again(given)["observation"]
        True
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Tensor, int, Tensor]] = {}

    def of(self, leaves: Leaves) -> Leaves:
        """The tensors that a step gave, to be kept."""
        copies = copy_of(leaves)
        self._made = {
            key: (tensor, tensor._version, copies[key])
            for key, tensor in leaves.items()
            if not tensor.is_inference()
        }
        return copies

    def again(self, leaves: Leaves) -> Leaves:
        """The tensors that the next step begins with; those already copied are not again."""
        return {key: self._again(key, tensor) for key, tensor in leaves.items()}

    def _again(self, key: Any, tensor: Tensor) -> Tensor:
        original, version, copy = self._made.get(key, (None, 0, tensor))
        return copy if original is tensor and tensor._version == version else tensor.clone()


def stack(rows: Sequence[Leaves], dim: int) -> Leaves:
    """The tensors of all steps, with a dimension for time.

    Raises:
        ValueError: keys, shapes or dtypes differ between steps.
    """
    first = rows[0] if rows else {}
    for row in rows:
        if row.keys() != first.keys():
            key = min(row.keys() ^ first.keys(), key=str)
            raise ValueError(
                f"some steps of a batch have the key {key!r} and others lack it; environment and "
                "policy must give the same keys in every step. A policy that sets "
                f"('next', {key!r}) for its next step must set {key!r} itself in each step"
            )
    return {key: _stack(key, [row[key] for row in rows], dim) for key in first}


def _stack(key: Any, column: list[Tensor], dim: int) -> Tensor:
    first = column[0]
    for tensor in column:
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            raise ValueError(
                f"{key!r} is {first.dtype} of shape {tuple(first.shape)} in one step and "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} in another"
            )
    return torch.stack(column, dim)


#: Called before every step; gives the version of the policy that is about to act.
BetweenSteps: TypeAlias = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that a loop gathered; time is the last batch dimension.

    Args:
        root: what the policy saw and did, by key.
        next: the outcome, by key.
        ended: after which steps an episode was over.
        versions: the version of the policy that acted in each step.
        begins: whether the first step begins episodes, though the one before it ended none.
    """

    root: Leaves
    next: Leaves
    ended: Tensor
    versions: Tensor
    begins: bool = False


@dataclass(slots=True)
class _Acted:
    """A step whose action is chosen, and that is still to be made or recorded."""

    tensordict: TensorDictBase
    root: Leaves
    version: int
    #: Return the environment's result, and the root of the next step, if there is one.
    made: tuple[TensorDictBase, TensorDictBase | None] | None = None


class TensorDictLoop:
    """Steps an environment by its TensorDict methods; a new episode begins where one has ended.

    A run that was cut short, by Ctrl-C or an error, is continued by the next one: what it gathered
    is kept here.

    Args:
        env: any environment.
    """

    def __init__(self, env: Env) -> None:
        self._env = env
        self._conventions = Conventions(env)
        self._flag_keys = self._conventions.flag_keys
        self._step_and_reset: Callable[[TensorDictBase], Any] | None = optional(
            env, "step_and_maybe_reset"
        )
        self.restart()

    def observation_keys(self) -> list[Any]:
        """The keys that a reset gives, flags apart."""
        return [key for key in leaves_of(self._begin()) if key not in self._flag_keys]

    def restart(self) -> None:
        """Begin the next run with a reset, and drop what one that was cut short has gathered."""
        self._root: TensorDictBase | None = None
        self._acted: _Acted | None = None
        self._stepped: TensorDictBase | None = None
        # The keys of what the policy set under "next", to find it at the root of the next step.
        self._carried: tuple[Any, ...] = ()
        self._frames: list[tuple[Leaves, Leaves, int]] = []
        self._copies = Copies()

    def midway(self) -> bool:
        """Return whether a run was cut short."""
        return bool(self._frames) or self._acted is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next run continues."""
        return {"root": self._root, "stepped": self._stepped, "carried": self._carried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.restart()
        self._root, self._stepped = state["root"], state["stepped"]
        self._carried = state["carried"]

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
        root = self._conventions.root(stack(self._even(roots), time), outcome, time + 1)
        ended = self._conventions.ended(outcome, time + 1)
        made = Steps(root, outcome, ended, torch.tensor(versions, device="cpu"))
        self._frames = []
        return made

    def _even(self, roots: Sequence[Leaves]) -> Sequence[Leaves]:
        """Leave out the flags of parts that only some steps have: a reset need not give them."""
        uneven = {key for key in self._flag_keys if any(key not in root for root in roots)}
        return [{k: seen for k, seen in root.items() if k not in uneven} for root in roots]

    def _step(self, act: TensorDictPolicy, between_steps: BetweenSteps) -> None:
        if self._acted is None:
            version = between_steps()
            # A copy, as a policy that is interrupted may have set entries that it begins with.
            given = self._begin().copy()
            acted = act(given)
            if acted is not given:
                # A policy may return what it has set and no more.
                acted = given.copy().update(acted)
            following = acted.get("next", None)
            self._carried = () if following is None else tuple(leaves_of(following))
            # Copied before the step, since environments may change their tensors in place.
            seen = recorded_of(acted)
            for key in self._conventions.decisive_keys:
                seen.pop(key, None)
            self._acted = _Acted(acted, self._copies.again(seen), version)
        acted = self._acted.tensordict
        if self._acted.made is None:
            if self._step_and_reset is None:
                self._acted.made = self._env.step(acted), None
            else:
                self._acted.made = self._step_and_reset(acted)
        stepped, root = self._acted.made
        outcome = self._copies.of(recorded_of(following_of(self._env, acted, stepped)))
        frame = ((self._acted.root, outcome, self._acted.version),)
        end = len(self._frames)
        # Nothing is called in these lines, so that Ctrl-C comes before or after both.
        self._frames[end:] = frame
        self._acted, self._root, self._stepped = None, root, stepped

    def _begin(self) -> TensorDictBase:
        if self._root is None:
            stepped = self._stepped
            self._root = self._reset() if stepped is None else self._root_after(stepped)
        return self._root

    def _reset(self) -> TensorDictBase:
        # Values of a policy must not come back where an environment gives its own every time.
        return reset_env(self._env).copy()

    def _root_after(self, stepped: TensorDictBase) -> TensorDictBase:
        following = stepped["next"]
        # What no step gives again stays, such as the parameters of a model.
        root: TensorDictBase = stepped.exclude("next", *self._conventions.action_keys)
        root.update(following.exclude(*self._conventions.reward_keys))
        mask = self._conventions.ended_now(following)
        if not mask.any():
            return root
        # The environment may have written into the tensors that it gave before.
        self._copies = Copies()
        if mask.all():
            return self._reset()
        request = self._conventions.reset_request(root, mask)
        self._conventions.clear(root, mask)
        fresh = leaves_of(reset_env(self._env, request))
        for key, new in fresh.items():
            if RESET not in (key, key[-1]):
                old = root.get(key, None)
                root.set(key, new if old is None else torch.where(spread(mask, new), new, old))
        for key in self._carried:
            carried = root.get(key, None)
            # An environment may replace what is under "next" altogether.
            if carried is not None and key not in fresh and key not in self._flag_keys:
                root.set(key, carried.masked_fill(spread(mask, carried), 0))
        return root
