"""Everything that one worker needs to know to begin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sync_core.collector.rollout import RolloutOptions


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WorkerRecipe:
    """How to make what one worker hosts.

    Args:
        seat: its number, which no other worker of the collector ever had, not even one of the same
            id that it replaces.
        env_fn: makes its environment.
        policy: its policy; None for random actions, or where ``policy_fn`` makes it.
        policy_fn: makes its policy.
        share_policy: let it act with the very object ``policy``, not with a copy.
        seed: where its random state begins, if it has a process of its own.
        one_thread: let torch use one thread there.
        options: how it makes batches.
    """

    seat: int
    env_fn: Callable[[], Any]
    policy: Any = None
    policy_fn: Callable[[], Any] | None = None
    share_policy: bool = False
    seed: int = 0
    one_thread: bool = True
    options: RolloutOptions

    def __repr__(self) -> str:
        return f"WorkerRecipe(seat={self.seat})"

    def make_policy(self) -> Any:
        """The policy, made in the worker."""
        if self.policy_fn is not None:
            return self.policy_fn()
        # What came from another process is a copy already.
        if self.share_policy or self.options.owns_process:
            return self.policy
        return copy.deepcopy(self.policy)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recipes:
    """The recipes of all workers of a collector, also of those that come later.

    Args:
        env_fns: a function that makes an environment, for each of the first workers; one that is
            added later begins again with the first function.
        policy: the policy of all; None for random actions, or where functions make them.
        policy_fns: a function that makes a policy, or None, for each of the first workers.
        share_policy: see `WorkerRecipe`.
        seed: of the first seat; every other one is derived from it.
        one_thread: see `WorkerRecipe`.
        options: likewise.
    """

    env_fns: tuple[Callable[[], Any], ...]
    policy: Any
    policy_fns: tuple[Callable[[], Any] | None, ...]
    share_policy: bool
    seed: int
    one_thread: bool
    options: RolloutOptions

    def __call__(self, worker_id: int, seat: int) -> WorkerRecipe:
        """The recipe for a worker."""
        return WorkerRecipe(
            seat=seat,
            env_fn=self.env_fns[worker_id % len(self.env_fns)],
            policy=self.policy,
            policy_fn=self.policy_fns[worker_id % len(self.policy_fns)],
            share_policy=self.share_policy,
            seed=self.seed + seat,
            one_thread=self.one_thread,
            options=self.options,
        )
