"""The step loop that works with every environment, and the stacking of its steps."""

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
    """Return the tensors of a TensorDict by key, without the entries under ``"next"``.

    Raises:
        TypeError: an entry is not a tensor.
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
    """Return the leaves of a batch, without private ones (with an underscore)."""
    leaves = leaves_of(tensordict)
    return {key: tensor for key, tensor in leaves.items() if not _is_private(key)}


@lru_cache(maxsize=1024)
def _is_private(key: str | tuple[str, ...]) -> bool:
    return any(name.startswith("_") for name in ((key,) if isinstance(key, str) else key))


def copy_of(leaves: Leaves) -> Leaves:
    """Copy the tensors of one step, since the next step may overwrite the originals."""
    return {key: tensor.clone() for key, tensor in leaves.items()}


class Copies:
    """Copies the tensors of steps, each tensor once.

    The next step often begins with the same tensor objects that the last step returned.

    Example:
        >>> copies, given = Copies(), {"observation": torch.zeros(1)}
        >>> copies.of(given)["observation"] is copies.again(given)["observation"]
        True
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Tensor, int, Tensor]] = {}

    def of(self, leaves: Leaves) -> Leaves:
        """Copy the tensors that a step returned."""
        copies = copy_of(leaves)
        self._made = {
            key: (tensor, tensor._version, copies[key])
            for key, tensor in leaves.items()
            if not tensor.is_inference()
        }
        return copies

    def again(self, leaves: Leaves) -> Leaves:
        """Copy the tensors that the next step begins with, except those already copied."""
        return {key: self._again(key, tensor) for key, tensor in leaves.items()}

    def _again(self, key: Any, tensor: Tensor) -> Tensor:
        original, version, copy = self._made.get(key, (None, 0, tensor))
        return copy if original is tensor and tensor._version == version else tensor.clone()


def stack(rows: Sequence[Leaves], dim: int) -> Leaves:
    """Stack the tensors of all steps along a new time dimension.

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


#: Called before every step; returns the version of the policy that is about to act.
BetweenSteps: TypeAlias = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a loop; time is the last batch dimension.

    Args:
        root: the inputs and outputs of the policy, by key.
        next: the outcome, by key.
        ended: the steps that ended an episode.
        versions: the version of the policy that acted in each step.
        begins: whether the first step begins new episodes although the step before it ended none.
    """

    root: Leaves
    next: Leaves
    ended: Tensor
    versions: Tensor
    begins: bool = False


@dataclass(slots=True)
class _Acted:
    """A step whose action is chosen, and that is not yet made or recorded."""

    tensordict: TensorDictBase
    root: Leaves
    version: int
    #: Step and return the environment's result, and the root of the next step if there is one.
    made: tuple[TensorDictBase, TensorDictBase | None] | None = None


class TensorDictLoop:
    """Steps an environment by its TensorDict methods, and resets ended episodes.

    If Ctrl-C or an error interrupts a run, its steps are kept here and the next run continues it.

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
        """Return the keys of a reset, without flags."""
        return [key for key in leaves_of(self._begin()) if key not in self._flag_keys]

    def restart(self) -> None:
        """Begin the next run with a reset, and drop the steps of an interrupted run."""
        self._root: TensorDictBase | None = None
        self._acted: _Acted | None = None
        self._stepped: TensorDictBase | None = None
        # The keys of values that the policy set under "next", to find them at the root of the next
        # step.
        self._carried: tuple[Any, ...] = ()
        self._frames: list[tuple[Leaves, Leaves, int]] = []
        self._copies = Copies()

    def midway(self) -> bool:
        """Return whether a run was interrupted."""
        return bool(self._frames) or self._acted is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next run continues."""
        return {"root": self._root, "stepped": self._stepped, "carried": self._carried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.restart()
        self._root, self._stepped = state["root"], state["stepped"]
        self._carried = state["carried"]

    def run(
        self, steps: int, policy: TensorDictPolicy | None, between_steps: BetweenSteps
    ) -> Steps:
        """Run some steps; with None as the policy, the actions are random."""
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
        """Drop flags of parts that only some steps have: a reset need not return them."""
        uneven = {key for key in self._flag_keys if any(key not in root for root in roots)}
        return [{k: seen for k, seen in root.items() if k not in uneven} for root in roots]

    def _step(self, act: TensorDictPolicy, between_steps: BetweenSteps) -> None:
        if self._acted is None:
            version = between_steps()
            # A copy, since an interrupted policy may have set entries of its input.
            given = self._begin().copy()
            acted = act(given)
            if acted is not given:
                # A policy may return only the entries that it has set.
                acted = given.copy().update(acted)
            following = acted.get("next", None)
            self._carried = () if following is None else tuple(leaves_of(following))
            # Copied before the step, since the environment may change its tensors in place.
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
        # These lines call nothing, so that Ctrl-C comes before or after both.
        self._frames[end:] = frame
        self._acted, self._root, self._stepped = None, root, stepped

    def _begin(self) -> TensorDictBase:
        if self._root is None:
            stepped = self._stepped
            self._root = self._reset() if stepped is None else self._root_after(stepped)
        return self._root

    def _reset(self) -> TensorDictBase:
        # A policy's values must not overwrite those that the environment returns in every step.
        return reset_env(self._env).copy()

    def _root_after(self, stepped: TensorDictBase) -> TensorDictBase:
        following = stepped["next"]
        # Entries that no step returns again are kept, such as the parameters of a model.
        root: TensorDictBase = stepped.exclude("next", *self._conventions.action_keys)
        root.update(following.exclude(*self._conventions.reward_keys))
        mask = self._conventions.ended_now(following)
        if not mask.any():
            return root
        # The environment may have written into tensors that it returned before.
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
            # An environment may replace the whole entry "next".
            if carried is not None and key not in fresh and key not in self._flag_keys:
                root.set(key, carried.masked_fill(spread(mask, carried), 0))
        return root
