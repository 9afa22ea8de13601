"""Collects experience with workers, and keeps their policies fresh."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, Unpack

import torch
from tensordict import TensorDictBase

from sync_collector.auto_update import AutoUpdate, StaleWatch
from sync_collector.background import BackgroundCollection
from sync_collector.delivery import BatchDelivery
from sync_collector.life import Life, end
from sync_collector.models_elsewhere import ModelsElsewhere
from sync_collector.multi_model import make_weights
from sync_collector.options import (
    check_buffer,
    check_on_worker_failure,
    check_policy,
    count_frames,
    count_workers,
    factories,
    refresh_interval,
)
from sync_collector.output import Output, ReplayBuffer
from sync_collector.relay import Relay
from sync_collector.replacement import OnWorkerFailure, Replacement
from sync_collector.requests import Requests
from sync_collector.rollout import RolloutOptions
from sync_collector.schedules import FirstReady, Synchronous
from sync_collector.schemes import POLICY, copied, elsewhere, own, schemes_of
from sync_collector.stats import CollectorStats
from sync_collector.updates import Updates
from sync_collector.warmup import Warmup
from sync_collector.worker_options import WorkerOptions, check_arguments, options_of_workers
from sync_collector.worker_pool import WorkerPool, warn_if_rounded
from sync_collector.worker_spec import WorkerSpecs
from sync_core import Address
from sync_core.checks import check_count, check_function, check_mapping, check_seconds
from sync_core.workers import (
    WorkerGroup,
    check_worker_options,
    choose_group,
    release_with,
    shares_policy,
)


class Collector(Life, Updates):
    """Runs a policy in environments on workers, and yields what they did as TensorDicts.

    With ``sync=True``, all workers make a part of each batch, between two iterations and with the
    newest weights; batches have the shape ``[num_workers, frames_per_batch // num_workers]``.
    Otherwise each batch is one worker's, of the shape ``[frames_per_batch]``, the first that is
    ready, and a worker that runs on its own begins its next one at once, while the trainer
    learns. Environments that are stepped together put their dimension before the one of time,
    which is the last and the only one with a name, ``"time"``.

    A frame holds what the policy saw and did, ``"next"`` with the outcome (the true
    observation also where an episode ended), ``("collector", "traj_ids")``, unique over workers
    and time, and ``policy_version``. A new episode begins where one ended, so ``done`` is
    False at the root, always.

    A collector is its own iterator: leaving a loop and beginning another loses and repeats
    nothing; what ``postproc`` or the replay buffer raised at is given to it again. When
    ``total_frames`` are reached it shuts down. An error from a worker shuts it down
    too; a late batch (`WorkerTimeoutError`) does not.

    Args:
        create_env_fn: makes an environment (`sync_collector.envs.Env`, or one of Gymnasium's,
            single or vector); or a list, one for each worker.
        policy: takes a TensorDict or observations (`sync_collector.policies.adapt`); None
            for random actions. Workers begin with a copy of it as it is now.
        policy_factory: makes a worker's policy in the worker; or a list, one for each worker. Only
            policies whose weights have the same names and shapes in every worker can be updated.
        scheme: how weights travel: the name of a scheme, or a plugin object; ``"shm"`` by default.
        weight_sync_schemes: instead, several models by name, each with a scheme, or with a mapping
            that has ``"scheme"`` and its options. A name is a path in a worker: ``"policy"``,
            ``"policy.critic"``, ``"env.transform[0]"``. Workers commit several models together,
            between two batches. A mapping with the key ``"workers"`` is for a model that other
            workers hold, such as an actor of yours: ``{"critic": {"scheme": "ray", "workers":
            [actor]}}``. That model is sent when an update names it; `Sender` has the other keys,
            such as ``"model_id"``, by default the model's name. The rest is as without it.
        models: what the trainer has under these names, ``"policy"`` apart. Of one whose name is no
            path, such as ``"critic"``, every worker gets a copy.
        weight_recv_schemes: see `register_scheme_receiver`.
        update_after_each_batch: refresh a worker before it begins its next batch; not for `start`.
        max_weight_update_interval: refresh a worker that has made so many batches with the same
            weights; -1 for only when told to.
        workers: what workers are: the name of a worker group, or its class. None for what suits
            the scheme: the group of its name, else ``process`` if it crosses processes, else
            ``inline``.
        num_workers: how many workers; by default as many as the lists have entries, or 1.
        frames_per_batch: the frames of a batch.
        total_frames: end as soon as that many frames were yielded; -1 for never.
        sync: whether a batch is made by all workers.
        layers: layers for the weights on their way.
        zero_copy: let the workers' parameters be views of what arrives.
        scheme_options: options of the scheme.
        worker_options: options of the worker group. In workers with a process of their own, torch
            uses one thread unless ``torch_threads`` is among them.
        track_policy_version: record ``policy_version`` and ``("next", "policy_version")``.
        split_trajs: yield a row for each trajectory (`split_trajectories`).
        postproc: changes every batch before it is yielded or written, after ``split_trajs``.
        replay_buffer: has ``extend``, which gets what each worker makes. None is yielded then.
        extend_in_workers: let workers write, for a buffer that is the same wherever it travels.
        init_random_frames: act at random for at least that many frames of all workers together.
        num_workers_per_collector: how many environments each worker makes and steps together.
        on_worker_failure: when a worker dies: ``"raise"`` an error that names it, and shut down; or
            ``"restart"``: another begins new episodes in its place, with the newest weights.
        collector_kwargs: options of single workers: a `WorkerOptions`, or one for each.
        timeout: deadline of blocking calls, in seconds; also of waiting for a batch.
        **worker: options of all workers: ``max_frames_per_traj``, ``reset_at_each_iter``,
            ``exploration_type``, ``trust_policy``, ``device``, ``env_device``, ``policy_device``
            and ``storing_device``; see `WorkerOptions`.

    Raises:
        ValueError: arguments that do not go together.
        PluginError: the scheme or the worker group cannot be found or used.
        RemoteCallError: an environment or a policy could not be made; it has the traceback.
        TypeError: an argument that there is not, or the policy's own arguments or outputs do not
            fit the environment.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> with Collector(CountingEnv, scheme="none", frames_per_batch=4, total_frames=8) as c:
        ...     [batch["observation"].flatten().tolist() for batch in c]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 0.0, 1.0, 2.0]]
    """

    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        scheme: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        models: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Address] | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        workers: str | type[WorkerGroup] | None = None,
        num_workers: int | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        sync: bool = False,
        layers: Sequence[Any] = (),
        zero_copy: bool = False,
        scheme_options: Mapping[str, Any] | None = None,
        worker_options: Mapping[str, Any] | None = None,
        track_policy_version: bool = True,
        split_trajs: bool = False,
        postproc: Callable[[TensorDictBase], Any] | None = None,
        replay_buffer: ReplayBuffer | None = None,
        extend_in_workers: bool = False,
        init_random_frames: int = -1,
        num_workers_per_collector: int = 1,
        on_worker_failure: OnWorkerFailure = "raise",
        collector_kwargs: WorkerOptions | Sequence[WorkerOptions] | None = None,
        timeout: float = 60.0,
        **worker: Unpack[WorkerOptions],
    ) -> None:
        check_arguments(worker, Collector)
        timeout = check_seconds(timeout)
        check_mapping(scheme_options or {}, "scheme_options", "{'slots': 3}")
        if postproc is not None:
            check_function(postproc, "postproc")
        arguments = {"layers": layers, "zero_copy": zero_copy, **(scheme_options or {})}
        known = models or {}
        all_schemes = schemes_of(scheme, arguments, weight_sync_schemes, known)
        schemes, held = own(all_schemes), elsewhere(all_schemes)
        own_models = {name: model for name, model in known.items() if name not in held}
        group_class = choose_group([each.scheme for each in schemes.values()], workers)
        check_worker_options(group_class, worker_options or {})
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
        random_frames = check_count(init_random_frames, "init_random_frames", least=0, never="none")
        check_on_worker_failure(on_worker_failure, group_class)
        check_buffer(replay_buffer, extend_in_workers=extend_in_workers)
        output = Output(
            split_trajs=split_trajs,
            postproc=postproc,
            replay_buffer=replay_buffer,
            extend_in_workers=extend_in_workers,
        )
        specs = WorkerSpecs(
            env_fns=factories(create_env_fn, num_workers, "create_env_fn"),
            policy=policy,
            policy_fns=(None,)
            if policy_factory is None
            else factories(policy_factory, num_workers, "policy_factory"),
            models=copied(own_models),
            share_policy=shared,
            seed=int(torch.randint(2**31, ()).item()),
            one_thread="torch_threads" not in (worker_options or {}),
            num_envs=check_count(num_workers_per_collector, "num_workers_per_collector"),
            options=options_of_workers(
                RolloutOptions(
                    frames_per_batch=frames_per_batch // num_workers if sync else frames_per_batch,
                    track_policy_version=track_policy_version,
                    owns_process="cross_process" in group_class.capabilities,
                    parallel="parallel" in group_class.capabilities,
                    deliver=output.in_worker if extend_in_workers else None,
                ),
                num_workers,
                worker,
                collector_kwargs,
            ),
        )
        specs.check_policy()
        specs.give_shapes()
        self._timeout, self._specs = timeout, specs
        self._pool = WorkerPool(group_class, specs, num_workers, timeout, worker_options)
        try:
            warn_if_rounded(self._pool, specs.options[0].frames_per_batch)
            self._replacement = Replacement(self._pool, on_worker_failure)
            self._warmup = Warmup(self._pool, random_frames, together=sync)
            self._requests = Requests(self._pool, timeout, self._warmup.order, self._replacement)
            self._requests.on_drop.append(self._warmup.take_back)
            self._weights = make_weights(
                self._pool,
                self._requests,
                schemes,
                collector=weakref.ref(self),
                policy=policy,
                models=own_models,
                made_by_workers=policy_factory is not None,
                timeout=timeout,
            )
            self._elsewhere = ModelsElsewhere(
                held, known, collector=weakref.ref(self), timeout=timeout
            )
        except BaseException:
            self._pool.stop()
            raise
        self._close = release_with(self, end, self._pool, self._weights, self._elsewhere)
        auto_update = AutoUpdate(interval, self._pool, self._requests, self._weights)
        self._delivery = BatchDelivery(
            pool=self._pool,
            schedule=Synchronous(self._pool, self._requests)
            if sync
            else FirstReady(self._pool, self._requests),
            requests=self._requests,
            weights=self._weights,
            auto_update=auto_update,
            stale=StaleWatch(
                self._weights, {} if shared or interval >= 0 else self._weights.models
            ),
            output=output,
            total_frames=total_frames,
            close=self._close,
        )
        self._relay = Relay(self._weights, self._pool, self._replacement, timeout)
        self._background = BackgroundCollection(self._delivery, self._relay.look)
        try:
            self.register_scheme_receiver(weight_recv_schemes or {})
        except BaseException:
            self.shutdown()
            raise

    def stats(self) -> CollectorStats:
        """Return counts of what was collected, and the lag of policies."""
        self._background.check()
        return self._delivery.stats()

    def __iter__(self) -> Self:
        return self

    # Not Optional: every batch is a TensorDict where there is no replay buffer.
    def __next__(self) -> TensorDictBase | Any:
        self._background.check(idle=True)
        self._relay.look()
        if self._delivery.wanted == 0:
            self.shutdown()
        return self._delivery.next_batch()

    def next(self) -> TensorDictBase | None:
        """The next batch, or None at the end."""
        try:
            return self.__next__()
        except StopIteration:
            return None

    def start(self) -> None:
        """Collect in the background, into the replay buffer; doing so again does nothing.

        Workers stay until `shutdown` when ``total_frames`` are reached. What goes wrong is raised
        by the next call of any method.

        Raises:
            RuntimeError: there is no replay buffer; or workers are refreshed by themselves, which
                would be in the middle of a training step.
            ClosedError: the collector was shut down.
        """
        self._check_open()
        self._background.start()

    def pause(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """For ``with``: let what is under way come into the replay buffer, and nothing more.

        Leaving the block continues. Where nothing runs in the background, nothing happens.

        Args:
            timeout: seconds to come to rest; None for the collector's.

        Raises:
            TimeoutError: it did not come to rest in time.
        """
        seconds = self._timeout if timeout is None else check_seconds(timeout)
        return self._background.paused(seconds)
