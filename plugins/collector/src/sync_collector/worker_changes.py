"""Adds workers to a collector that runs, and removes some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sync_collector.batch_requests import BatchRequests
from sync_collector.model_weights import ModelWeights
from sync_collector.options import (
    changed_options,
    check_acts,
    count_workers,
    factories,
    per_worker,
)
from sync_collector.policy_module import module_of
from sync_collector.relay import PolicyRelay
from sync_collector.schemes import POLICY
from sync_collector.worker_pool import WorkerPool
from sync_collector.worker_spec import WorkerSpecs
from sync_core import Layout, ModelError, OptionError
from sync_core.checks import check_count, normalize
from sync_core.models import check_match, named_tensors


class WorkerChanges:
    """The changes of a collector's workers; see the methods of `Collector` with the same names.

    Args:
        specs: what workers are made from.
        pool: the workers.
        requests: batches that they were asked for.
        weights: the collector's models.
        relay: reads a model that only the workers have.
    """

    def __init__(
        self,
        specs: WorkerSpecs,
        pool: WorkerPool,
        requests: BatchRequests,
        weights: ModelWeights,
        relay: PolicyRelay,
    ) -> None:
        self._specs = specs
        self._pool = pool
        self._requests = requests
        self._weights = weights
        self._relay = relay

    def add_workers(self, num_workers: int | None, create_env_fn: Any) -> tuple[int, ...]:
        """Start workers that differ from the others by their environments at most."""
        num_workers = count_workers(num_workers, create_env_fn)
        if create_env_fn is None:
            return tuple(self._pool.add() for _ in range(num_workers))
        env_fns = factories(create_env_fn, num_workers, "create_env_fn")
        return tuple(self._pool.add(env_fn=env_fn) for env_fn in env_fns)

    def add_collectors(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        num_envs: int,
        policy: Any,
        collector_kwargs: Any,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    ) -> tuple[int, ...]:
        """Start a worker for each function, with its own options."""
        num_envs = check_count(num_envs, "num_envs")
        num_workers = count_workers(None, create_env_fn)
        env_fns = factories(create_env_fn, num_workers, "create_env_fn")
        configs = per_worker(remote_configs, num_workers, "remote_configs")
        given = per_worker(collector_kwargs, num_workers, "collector_kwargs")
        base = replace(self._specs.options[0], num_envs=num_envs)
        options = [changed_options(base, each) for each in given]
        changes: dict[str, Any] = {}
        if policy is not None:
            self._check_policy(policy)
            changes = {"policy": policy, "policy_fn": None}
        return tuple(
            self._pool.add(
                {} if config is None else {"remote_configs": config},
                env_fn=env_fn,
                options=option,
                **changes,
            )
            for env_fn, option, config in zip(env_fns, options, configs, strict=True)
        )

    def remove_workers(self, worker_ids: int | Iterable[int]) -> None:
        """End some workers, but not all."""
        ids = normalize(worker_ids, self._pool.ids)
        if set(ids) == set(self._pool.ids):
            raise ValueError("no worker would be left; to end the collector, type shutdown()")
        for worker_id in ids:
            self._pool.remove(worker_id)
            self._requests.drop(worker_id)

    def _check_policy(self, policy: Any) -> None:
        """Raise unless a new worker may begin with this policy."""
        check_acts(policy, "policy is")
        if self._specs.share_policy:
            raise OptionError(
                "workers act with the trainer's own policy, so new ones have no other; leave out "
                "policy=, or use scheme='thread'"
            )
        module = module_of(policy)
        if POLICY not in self._weights.names:
            return
        own = self._weights.models.get(POLICY)
        held = self._relay.read_model(POLICY) if own is None else named_tensors(own, "tensordict")
        given = {} if module is None else named_tensors(module, "tensordict")
        if bool(held) != bool(given):
            raise ModelError(
                "the given policy has no weights, but the collector's policy has; give policy= a "
                "module with the same weights, or leave it out"
                if held
                else "the given policy has weights, but the collector's policy has no weights, so "
                "they would never be updated; give policy= a function, or leave it out"
            )
        if held:
            check_match(Layout.of(held), Layout.of(given))
