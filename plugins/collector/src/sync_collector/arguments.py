"""Checks the arguments of a collector and converts them for the parts of the collector."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from sync_collector.collector_worker import WorkerSpecs
from sync_collector.delivery import Output, ReplayBuffer
from sync_collector.envs.gym import EnvOptions
from sync_collector.options import (
    BatchOptions,
    WorkerOptions,
    check_buffer,
    check_on_worker_failure,
    check_policy,
    count_frames,
    count_workers,
    factories,
    options_of_workers,
    refresh_interval,
)
from sync_collector.policies import unwrapped, unwrapped_models
from sync_collector.reporting import StatsLogger
from sync_collector.rollout import RolloutOptions
from sync_collector.schemes import (
    GIVEN_BY_COLLECTOR,
    POLICY,
    ModelScheme,
    copied,
    elsewhere,
    own,
    schemes_of,
)
from sync_collector.torchrl_names import Named, TorchRLArguments
from sync_collector.worker_pool import OnWorkerFailure
from sync_core import Address, Sender, WorkerGroup
from sync_core.checks import check_count, check_function, check_mapping, check_seconds
from sync_plugin_std.workers import check_worker_options, choose_group, shares_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The parts of a collector before anything is started.

    Args:
        specs: the specification of each worker, including its policy.
        num_workers: the initial number of workers.
        group: the worker group.
        group_options: options of the group.
        on_worker_failure: see `Collector`.
        timeout: deadline of blocking calls, in seconds.
        sync: whether all workers together make each batch.
        total_frames: the frames after which the collector ends; -1 for never.
        random_frames: the number of frames with random actions; -1 for none.
        interval: a worker is updated automatically after this number of batches; -1 for never.
        schemes: the scheme of each model that the collector's workers hold.
        elsewhere: the scheme of each model that other workers hold.
        models: the trainer's models, except the policy.
        output: post-processes batches and writes them to the replay buffer.
        reporter: logs statistics.
        receivers: addresses from which the collector receives models.
    """

    specs: WorkerSpecs
    num_workers: int
    group: type[WorkerGroup]
    group_options: Mapping[str, Any]
    on_worker_failure: OnWorkerFailure
    timeout: float
    sync: bool
    total_frames: int
    random_frames: int
    interval: int
    schemes: Mapping[str, ModelScheme]
    elsewhere: Mapping[str, ModelScheme]
    models: Mapping[str, Any]
    output: Output
    reporter: StatsLogger
    receivers: Mapping[str, Address]

    @property
    def own_models(self) -> dict[str, Any]:
        """Return the trainer's models that the collector's own workers hold."""
        return {n: model for n, model in self.models.items() if n not in self.elsewhere}

    @property
    def made_by_workers(self) -> bool:
        """Return whether workers make their policies themselves."""
        return self.specs.policy_fns != (None,)

    @classmethod
    def checked(
        cls,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None,
        scheme: Any,
        scheme_options: Mapping[str, Any] | None,
        layers: Sequence[Any],
        zero_copy: bool,
        weight_sync_schemes: Mapping[str, Any] | None,
        models: Mapping[str, Any] | None,
        update_after_each_batch: bool,
        max_weight_update_interval: int,
        workers: str | type[WorkerGroup] | None,
        worker_options: Mapping[str, Any] | None,
        num_workers: int | None,
        frames_per_batch: int,
        total_frames: int,
        sync: bool,
        env_options: EnvOptions,
        replay_buffer: ReplayBuffer | None,
        on_worker_failure: OnWorkerFailure,
        log_to: Any,
        progress: bool,
        timeout: float,
        batch: BatchOptions | None,
        per_worker: WorkerOptions | Sequence[WorkerOptions] | None,
        torchrl: TorchRLArguments,
    ) -> Self:
        """Check the arguments of `Collector`, which raises the same errors."""
        timeout = check_seconds(timeout)
        check_mapping(scheme_options or {}, "scheme_options", "{'slots': 3}")
        named = Named.of(torchrl, batch, per_worker)
        batch = named.batch
        if batch.postproc is not None:
            check_function(batch.postproc, "postproc")
        # Workers have no torch process group, so they act with the module inside the wrapper.
        policy, known = unwrapped(policy), unwrapped_models(models)
        of_sender = {"layers": layers, "zero_copy": zero_copy, **(scheme_options or {})}
        all_schemes = schemes_of(scheme, of_sender, weight_sync_schemes, known)
        schemes, held = own(all_schemes), elsewhere(all_schemes)
        own_models = {name: model for name, model in known.items() if name not in held}
        group = choose_group([each.scheme for each in schemes.values()], workers)
        check_worker_options(group, worker_options or {})
        policy_scheme = schemes[POLICY].scheme if POLICY in schemes else None
        shared = policy_scheme is not None and shares_policy(policy_scheme)
        num_workers = count_workers(num_workers, create_env_fn)
        check_policy(policy, policy_factory, policy_scheme, shares_policy=shared)
        interval = refresh_interval(
            max_weight_update_interval,
            each_batch=update_after_each_batch,
            has_weights=policy_factory is None or bool(own_models),
        )
        frames_per_batch = count_frames(frames_per_batch, num_workers, sync=sync)
        total_frames = check_count(total_frames, "total_frames", least=0, never="no end")
        random = check_count(batch.init_random_frames, "init_random_frames", least=0, never="none")
        reporter = StatsLogger(log_to, progress=progress, total_frames=total_frames)
        check_on_worker_failure(on_worker_failure, group)
        check_buffer(replay_buffer, extend_in_workers=batch.extend_in_workers)
        output = Output(
            split_trajs=batch.split_trajs,
            postproc=batch.postproc,
            replay_buffer=replay_buffer,
            extend_in_workers=batch.extend_in_workers,
            episode_stats=batch.episode_stats or reporter.enabled,
        )
        base = RolloutOptions(
            frames_per_batch=frames_per_batch // num_workers if sync else frames_per_batch,
            track_policy_version=batch.track_policy_version,
            episode_stats=output.episode_stats,
            owns_process="cross_process" in group.capabilities,
            parallel="parallel" in group.capabilities,
            deliver=output.in_worker if batch.extend_in_workers else None,
        )
        specs = WorkerSpecs(
            env_fns=factories(create_env_fn, num_workers, "create_env_fn"),
            policy=policy,
            policy_fns=(None,)
            if policy_factory is None
            else factories(policy_factory, num_workers, "policy_factory"),
            models=copied(own_models),
            share_policy=shared,
            seed=int(torch.randint(2**31, (), device="cpu").item()),
            one_thread="torch_threads" not in (worker_options or {}),
            env_options=env_options,
            options=options_of_workers(base, num_workers, named.common, named.own, named.own_name),
        )
        specs.check_policy()
        specs.give_shapes()
        return cls(
            specs=specs,
            num_workers=num_workers,
            group=group,
            group_options=worker_options or {},
            on_worker_failure=on_worker_failure,
            timeout=timeout,
            sync=sync,
            total_frames=total_frames,
            random_frames=random,
            interval=interval,
            schemes=schemes,
            elsewhere=held,
            models=known,
            output=output,
            reporter=reporter,
            receivers=named.receivers,
        )


# What to type instead of arguments that only TorchRL's collectors have.
_ELSEWHERE = {
    "num_collectors": "num_workers=… says how many workers there are",
    "collector_class": (
        "sync=True or False says whether all workers make each batch, and workers='process' or "
        "another worker group where they run"
    ),
    "weight_updater": (
        "scheme='shm' or another scheme, by its name or as an object, updates the workers' weights"
    ),
    "create_env_kwargs": (
        "let the functions have their arguments: functools.partial(make_env, size=3), or a list of "
        "these, one for each worker"
    ),
    "ray_init_config": "write worker_options={'ray_init_config': {…}}",
    "remote_configs": "write worker_options={'remote_configs': {…}}",
    "use_env_creator": "leave it out: functions travel by cloudpickle",
    "no_cuda_sync": "leave it out: there is no such option here",
}
_OTHER_OPTIONS = (
    "options of a scheme, or of its Sender, go into scheme_options={…}, and those of a worker "
    "group into worker_options={…}"
)


def check_names(given: Mapping[str, Any], owner: type) -> None:
    """Raise `TypeError` for an argument that neither a collector nor an option object has.

    Args:
        given: arguments that are not in the constructor's signature.
        owner: the class, whose constructor was called.
    """
    for name in given.keys() - TorchRLArguments.__annotations__.keys():
        meant = _meant(name, given[name], owner)
        raise TypeError(f"{owner.__name__} has no argument {name!r}; {meant}")


def _meant(name: str, value: Any, owner: type) -> str:
    """Return what to type instead of an unknown argument."""
    answers = {**_ELSEWHERE, **GIVEN_BY_COLLECTOR}
    if name in answers:
        return answers[name]
    for argument, options in (("batch", BatchOptions), ("per_worker", WorkerOptions)):
        if name in (one.name for one in fields(options)):
            return f"type {argument}={options.__name__}({name}={value!r})"
    of_sender = inspect.signature(Sender).parameters.keys() - {"model", "options"}
    if name in of_sender:
        return f"type scheme_options={{{name!r}: {value!r}}}"
    known = {*inspect.signature(owner).parameters, *TorchRLArguments.__annotations__}
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]!r}?"
    if near := difflib.get_close_matches(name, of_sender, n=1):
        return f"did you mean scheme_options={{{near[0]!r}: …}}?"
    return _OTHER_OPTIONS
