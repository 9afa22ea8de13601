"""Makes the rollouts of a collector's workers, in the workers themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sync_core.collector.rollout import Rollout, RolloutOptions, seed_process

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFactory:
    """Given to a worker group, which calls it with the id of each worker.

    Args:
        env_fns: a function that makes an environment, for each worker.
        policy: the policy; None for random actions, or when factories make it.
        policy_fns: a function that makes a policy, for each worker; none where ``policy`` counts.
        share_policy: let workers act with the very object ``policy``, not with copies of it.
        seed: where the random state of workers with a process of their own begins.
        one_thread: let torch use one thread in workers with a process of their own.
        options: what the rollouts have in common.
    """

    env_fns: tuple[Callable[[], Any], ...]
    policy: Any
    policy_fns: tuple[Callable[[], Any], ...]
    share_policy: bool
    seed: int
    one_thread: bool
    options: RolloutOptions

    def __call__(self, worker_id: int) -> Rollout:
        if self.options.owns_process:
            # Every fresh process has torch's one default seed: workers would act all alike.
            seed_process(self.seed + worker_id)
            if self.one_thread:
                # One step is too little work to share out, and threads that wait for each other
                # hold cores that the trainer and other workers need.
                torch.set_num_threads(1)
        env = self.env_fns[worker_id]()
        return Rollout(env, self._make_policy(worker_id), worker_id, self.options)

    def _make_policy(self, worker_id: int) -> Any:
        if self.policy_fns:
            return self.policy_fns[worker_id]()
        if self.share_policy:
            return self.policy
        return copy.deepcopy(self.policy)


def one_per_worker(
    given: Callable[[], Item] | Sequence[Callable[[], Item]], num_workers: int, name: str
) -> tuple[Callable[[], Item], ...]:
    """A function for each worker, from one for all or a list.

    Raises:
        TypeError: something that cannot be called.
        ValueError: a list of another length.
    """
    functions = (given,) * num_workers if callable(given) else tuple(given)
    for function in functions:
        if not callable(function):
            raise TypeError(
                f"{name} must be a function or a list of functions, not {function!r}; "
                f"type {name}=lambda: … to make one"
            )
    if len(functions) != num_workers:
        raise ValueError(
            f"{name} has {len(functions)} entries for {num_workers} workers; give one for each, "
            "or a single function"
        )
    return functions
