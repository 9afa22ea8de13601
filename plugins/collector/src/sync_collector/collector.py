"""Collects experience with workers, and keeps their policies fresh."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import torch
from tensordict import TensorDictBase

from sync_collector.auto_update import AutoUpdate, StaleWatch
from sync_collector.background import BackgroundCollection
from sync_collector.batch_requests import BatchRequests, RandomFrames
from sync_collector.collector_worker import CollectorWorker
from sync_collector.delivery import LET_END, BatchDelivery, CollectorStats, Output, ReplayBuffer
from sync_collector.envs.infos import InfoKeys
from sync_collector.evaluation import Evaluation, Evaluator
from sync_collector.model_weights import ModelWeights
from sync_collector.models_elsewhere import ModelsElsewhere
from sync_collector.options import (
    WorkerOptions,
    check_arguments,
    check_buffer,
    check_on_worker_failure,
    check_policy,
    count_frames,
    count_workers,
    factories,
    options_of_workers,
    refresh_interval,
)
from sync_collector.policy_module import unwrapped, unwrapped_models
from sync_collector.relay import PolicyRelay
from sync_collector.reporting import StatsLogger
from sync_collector.rollout import RolloutOptions
from sync_collector.schedules import FirstReady, Synchronous
from sync_collector.schemes import (
    POLICY,
    UpdateArguments,
    chosen,
    copied,
    elsewhere,
    own,
    schemes_of,
)
from sync_collector.state import State
from sync_collector.worker_changes import WorkerChanges
from sync_collector.worker_pool import OnWorkerFailure, WorkerPool, warn_if_rounded
from sync_collector.worker_spec import WorkerSpecs
from sync_core import (
    Address,
    ClosedError,
    PendingSend,
    Sender,
    SendReport,
    WorkerGroup,
)
from sync_core.checks import (
    check_count,
    check_function,
    check_integer,
    check_mapping,
    check_path,
    check_seconds,
)
from sync_core.transports import release_with
from sync_plugin_std.workers import check_worker_options, choose_group, shares_policy

Result = TypeVar("Result")

# How long what was sent before a collector registered may take, in seconds.
_SOON = 0.5


class Collector:
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
            for random actions. One of observations returns the action, ``(action, log_prob)`` or a
            dict with ``"action"``. Workers begin with a copy of it as it is now. If its class
            has a method ``on_commit(version)``, a worker calls that of its copy after each commit.
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
        models: what the trainer has under these names, ``"policy"`` apart. Of one whose name is
            not a path, such as ``"critic"``, every worker gets a copy.
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
        episode_stats: record ``("next", "episode_reward")`` and ``("next", "episode_length")``: the
            reward and the number of steps of each frame's episode so far, which are its totals
            where ``("next", "done")`` is True; and give their means in `stats`.
        info_keys: entries of Gymnasium's ``info`` to record, at the root and under ``"next"`` as
            observations are: names, or a mapping to dtypes; see `sync_collector.envs.GymEnv`.
        split_trajs: yield a row for each trajectory (`split_trajectories`).
        postproc: changes every batch before it is yielded or written, after ``split_trajs``.
        replay_buffer: has ``extend``, which gets what each worker makes. None is yielded then.
        extend_in_workers: let workers write, for a buffer that is the same wherever it travels.
        init_random_frames: act at random for at least that many frames of all workers together.
        num_workers_per_collector: how many environments each worker makes and steps together.
        on_worker_failure: what is done about a worker that dies, whose environment or policy
            raises, or that gives neither a batch nor an answer to an update within ``timeout``:
            ``"raise"`` an error that names it, and shut down, unless it is only late;
            ``"restart"``: another begins new episodes in its place, with the newest weights;
            ``"drop"``: remove it; ``"quarantine"``: do not wait for it for one ``timeout``, after
            each further failure for twice as long, up to 16; one that is dead is removed.
        collector_kwargs: options of single workers: a `WorkerOptions`, or one for each.
        log_to: logs `stats` with each batch, at the number of frames: a TensorBoard
            ``SummaryWriter``, a run of W&B, or a function ``log(values, step)``. It implies
            ``episode_stats``.
        progress: show a progress bar, by rich; it implies ``episode_stats`` too.
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
        episode_stats: bool = False,
        info_keys: InfoKeys = (),
        split_trajs: bool = False,
        postproc: Callable[[TensorDictBase], Any] | None = None,
        replay_buffer: ReplayBuffer | None = None,
        extend_in_workers: bool = False,
        init_random_frames: int = -1,
        num_workers_per_collector: int = 1,
        on_worker_failure: OnWorkerFailure = "raise",
        collector_kwargs: WorkerOptions | Sequence[WorkerOptions] | None = None,
        log_to: Any = None,
        progress: bool = False,
        timeout: float = 60.0,
        **worker: Unpack[WorkerOptions],
    ) -> None:
        check_arguments(worker, Collector)
        timeout = check_seconds(timeout)
        check_mapping(scheme_options or {}, "scheme_options", "{'slots': 3}")
        if postproc is not None:
            check_function(postproc, "postproc")
        arguments = {"layers": layers, "zero_copy": zero_copy, **(scheme_options or {})}
        # Workers have no process group of torch's, and act with the module inside.
        policy, known = unwrapped(policy), unwrapped_models(models)
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
        reporter = StatsLogger(log_to, progress=progress, total_frames=total_frames)
        check_on_worker_failure(on_worker_failure, group_class)
        check_buffer(replay_buffer, extend_in_workers=extend_in_workers)
        output = Output(
            split_trajs=split_trajs,
            postproc=postproc,
            replay_buffer=replay_buffer,
            extend_in_workers=extend_in_workers,
            episode_stats=episode_stats or reporter.enabled,
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
            info_keys=info_keys,
            options=options_of_workers(
                RolloutOptions(
                    frames_per_batch=frames_per_batch // num_workers if sync else frames_per_batch,
                    track_policy_version=track_policy_version,
                    episode_stats=episode_stats or reporter.enabled,
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
        self._timeout, self._reporter = timeout, reporter
        self._pool = WorkerPool(
            group_class,
            specs,
            num_workers,
            timeout,
            worker_options=worker_options,
            on_worker_failure=on_worker_failure,
        )
        try:
            warn_if_rounded(self._pool, specs.options[0].frames_per_batch)
            random = RandomFrames(self._pool, random_frames, together=sync)
            self._requests = BatchRequests(self._pool, timeout, random)
            self._weights = ModelWeights(
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
            self._relay = PolicyRelay(self._weights, self._pool)
            self._changes = WorkerChanges(
                specs, self._pool, self._requests, self._weights, self._relay
            )
            self._evaluator = Evaluator(specs, self._weights, self._relay.read_model)
        except BaseException:
            self._pool.stop()
            raise
        self._close = release_with(
            self, _end, self._pool, self._weights, self._elsewhere, self._evaluator, reporter
        )
        self._delivery = BatchDelivery(
            pool=self._pool,
            schedule=Synchronous(self._pool, self._requests)
            if sync
            else FirstReady(self._pool, self._requests),
            requests=self._requests,
            weights=self._weights,
            auto_update=AutoUpdate(interval, self._pool, self._requests, self._weights),
            stale=StaleWatch(
                self._weights, {} if shared or interval >= 0 else self._weights.models
            ),
            output=output,
            total_frames=total_frames,
            observers=(reporter.report,) if reporter.enabled else (),
            close=self._close,
        )
        self._state = State(
            self._pool, self._requests, self._delivery, self._weights, random, timeout
        )
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

    @property
    def sender(self) -> Sender | None:
        """Return the policy's sender; None as long as there are no weights to send."""
        return self.senders.get(POLICY)

    @property
    def senders(self) -> Mapping[str, Sender]:
        """Return the sender of each model that has weights to send."""
        return {**self._weights.senders, **self._elsewhere.senders}

    @overload
    def update_policy_weights_(
        self,
        policy_or_weights: Any = ...,
        *,
        blocking: Literal[True] = ...,
        **given: Unpack[UpdateArguments],
    ) -> SendReport: ...

    @overload
    def update_policy_weights_(
        self, policy_or_weights: Any = ..., *, blocking: bool, **given: Unpack[UpdateArguments]
    ) -> SendReport | PendingSend: ...

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        blocking: bool = True,
    ) -> SendReport | PendingSend:
        """Send the policy's weights as a new version, and let the workers commit them.

        A worker commits between two steps, also in the middle of a batch: ``policy_version`` says
        which frames were made with which weights. One with several models commits between two
        batches: all that an update names, or nothing. If a `skip_update` hook skips one of these
        models for a worker, all of them are skipped for that worker.

        Args:
            policy_or_weights: a module, a TensorDict or a state_dict; None for the trainer's own.
            weights: the same, by another name.
            policy: the same, by another name.
            worker_ids: one worker or several; None for all.
            model_id: whose weights they are; the policy's by default, or those of all models that
                the collector's workers hold if none were given. A model that other workers hold,
                ``weight_sync_schemes={name: {"scheme": "ray", "workers": [actor]}}``, is updated
                only by its name; ``worker_ids`` are those of its holders then.
            weights_dict: weights by the name of their model, instead of all the above; None for
                the trainer's own.
            blocking: wait until the workers have committed the version. Otherwise what is
                returned tells; an update that is under way when the next one begins is waited
                for first.

        Returns:
            A report, whose version is that of `stats` and of frames made with the weights.

        Raises:
            SendError: some workers do not have the version; the others do. Dead ones are replaced
                instead if they were given.
            ModelError: there are no weights to send, or no policy to load them into.
            KeyError: a model that there is not.
            ClosedError: the collector was shut down.
        """
        self._check_open()
        given = chosen(
            (policy_or_weights, weights, policy),
            model_id,
            weights_dict,
            (*self._weights.names, *self._elsewhere.senders),
        )
        held = self._elsewhere.among(given)
        if held is not None:
            return self._elsewhere.update(held, given[held], worker_ids, blocking=blocking)
        if self._pool.dismissed:
            # After the last batch, as in every other round of a training loop.
            return SendReport(self._weights.version, 0.0, {})
        return self._pool.see_through(
            lambda: self._weights.update(given, worker_ids, blocking=blocking)
        )

    def register_scheme_receiver(
        self, addresses: Mapping[str, Address], *, synchronize_weights: bool = True
    ) -> None:
        """Get models from senders elsewhere, as the worker that this collector is to them.

        Weights received, before every batch and by `receive_weights`, are passed on to this
        collector's own workers, and are acknowledged when these have committed them. A model that
        only the workers have, such as a policy of ``policy_factory``, is received into a copy of
        its tensors.

        Args:
            addresses: what each model's sender gave for this collector, by model.
            synchronize_weights: take what has been sent so far, if it comes within half a second.

        Raises:
            KeyError: a model that there is not.
            ModelError: neither the collector nor its workers have weights of that name.
        """
        self._check_open()
        self._relay.register(addresses)
        if synchronize_weights:
            self._relay.receive(_SOON)

    def receive_weights(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        timeout: float | None = None,
    ) -> Mapping[str, int]:
        """Receive models from senders elsewhere, or take the policy's weights, and pass them on.

        Args:
            policy_or_weights: a module, a TensorDict or a state_dict for the collector's own
                policy, if no senders were registered.
            weights: the same, by another name.
            policy: the same, by another name.
            timeout: seconds to wait for a version of any model; None for the collector's.

        Returns:
            The versions received, by model.

        Raises:
            ValueError: weights where there are senders, or neither.
            SenderLostError: a sender is gone.
            SendError: some workers do not have the version; its sender knows.
        """
        self._check_open()
        limit = self._timeout if timeout is None else check_seconds(timeout)
        return self._relay.receive_or_load((policy_or_weights, weights, policy), limit)

    def evaluate(
        self,
        episodes: int = 10,
        *,
        deterministic: bool = True,
        weights: Any = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Evaluation:
        """Run episodes with the trainer's policy as it is now, apart from collection.

        The calling thread runs a copy of the policy in another environment, made by the first
        function of ``create_env_fn``, and no frame counts. Workers in other processes continue
        meanwhile. Workers in threads finish their batches and wait, as the exploration type and
        the random state belong to the whole process. The result is logged to ``log_to``, too.

        Args:
            episodes: how many; each environment of several that are stepped together has its share.
            deterministic: act with ``exploration_type="deterministic"``. Policies of distributions
                follow it; others can read ``tensordict.nn.probabilistic.interaction_type()``.
            weights: a module, a TensorDict or a state_dict to act with; None for the trainer's own
                policy, or for what the workers have where ``policy_factory`` makes theirs.
            seed: of the environment, for the same episodes each time; None for new ones.
            timeout: seconds for all of them; None for the collector's.

        Raises:
            TimeoutError: not all episodes ended in time.
            LayoutMismatchError: weights that are others than the policy's.
            ClosedError: the collector was shut down.

        Example:
            >>> from sync_collector.envs import CountingEnv
            >>> with Collector(CountingEnv, scheme="none", frames_per_batch=4) as collector:
            ...     collector.evaluate(episodes=2).lengths
            (5, 5)
        """
        self._check_open()
        run = functools.partial(
            self._evaluator.evaluate,
            check_count(episodes, "episodes"),
            weights,
            deterministic=deterministic,
            seed=None if seed is None else check_integer(seed, "seed", "give one such as 0"),
            timeout=self._timeout if timeout is None else check_seconds(timeout),
        )
        result = self._at_rest(run) if self._evaluator.needs_rest else run()
        self._reporter.log(
            {
                "evaluation/reward": result.mean_reward,
                "evaluation/length": result.mean_length,
            },
            self._delivery.stats().frames,
        )
        return result

    def cascade_execute(self, path: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call, or return, the object at a path in every worker, in the order of their ids.

        Args:
            path: from ``env``, ``policy`` or another model on: ``"env.transform[0].reset"``.
            *args: for what is called.
            **kwargs: its keyword arguments.

        Raises:
            RemoteCallError: the path leads nowhere in a worker, or what was called raised.
        """
        self._check_open()
        check_path(path, "path")
        return self._pool.gather_all(
            f"execute {path!r}", CollectorWorker.execute, path, args, kwargs
        )

    def increment_version(self) -> None:
        """Count a new version of the weights that reached the workers another way.

        Frames made from now on carry it.
        """
        self._check_open()
        self._weights.increment_version()

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        return self._pool.ids

    def add_workers(
        self,
        num_workers: int | None = None,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    ) -> tuple[int, ...]:
        """Start more workers, which act with the newest weights from their first frame on.

        With ``sync=True``, batches have one more row for each of them from the next one on.

        Args:
            num_workers: how many; None for as many as there are functions, or 1.
            create_env_fn: makes an environment; or a list, one for each new worker. None for the
                functions that the collector was made with, from the first on.

        Returns:
            Their ids, never used before.

        Raises:
            RemoteCallError: an environment or a policy could not be made; workers added before
                that one stay.
            ClosedError: the collector was shut down, or has delivered all its frames.

        Example:
            >>> from sync_collector import Collector
            >>> from sync_collector.envs import CountingEnv
            >>> with Collector(CountingEnv, scheme="none", frames_per_batch=4, sync=True) as c:
            ...     c.add_workers(2), next(c).batch_size
            ((1, 2), torch.Size([3, 4]))
        """
        self._check_working()
        return self._changes.add_workers(num_workers, create_env_fn)

    def add_collectors(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: WorkerOptions | Sequence[WorkerOptions] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        """Start a worker for each function, as `add_workers` does; the name is that of TorchRL.

        Args:
            create_env_fn: makes an environment; or a list, one for each new worker.
            num_envs: the number of environments that each new worker makes and steps together.
            policy: what the new workers act with, in place of a copy of the collector's policy. It
                gets the weights that the other workers get, so that names, shapes and dtypes of
                its own must be the same.
            collector_kwargs: how the new workers make batches, as in `Collector`: a mapping, or a
                list with one for each. Options that are left out are as with the first worker.
            remote_configs: options of the new workers' actors, with ``workers="ray"``: a mapping,
                or a list with one for each.

        Returns:
            The ids of the new workers.

        Raises:
            LayoutMismatchError: the policy's weights are others than those of the collector's.
            RemoteCallError: as for `add_workers`; workers added before that one stay.
            ModelError: one of the given and the collector's policy has weights, the other none.
            OptionError: the worker group has no ``remote_configs``, or the workers act with the
                trainer's own policy.
            TypeError: something that cannot differ between workers.
            ValueError: a list of another length.
        """
        self._check_working()
        return self._changes.add_collectors(
            create_env_fn, num_envs, policy, collector_kwargs, remote_configs
        )

    def remove_workers(self, worker_ids: int | Iterable[int]) -> None:
        """End some workers; batches that were not taken yet are lost, uncounted.

        Raises:
            ValueError: no worker would be left; nothing was done.
            UnknownWorkerError: no such worker; nothing was done.
        """
        self._check_working()
        self._changes.remove_workers(worker_ids)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the workers' environments, one after the other, and begin their episodes again.

        Each worker gets the seed that the one before it returned. Batches that were made before and
        not taken yet are dropped: no frame that comes is older than the seed. With the same
        seed and the same weights, each worker makes the same batches. Workers with a process of
        their own seed its whole random state. Others share this process's: seed that yourself
        (``torch.manual_seed``) for a policy that draws from it. Several threads draw in no settled
        order; one does not, nor do workers that are ``"process"`` or ``"inline"``.

        Args:
            seed: for the first worker.
            static_seed: give all of them the same.

        Returns:
            The seed that the last worker returned.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
        """
        seed = check_integer(seed, "seed", "give one such as 0")
        return self._at_rest(lambda: self._state.seed(seed, static_seed))

    def state_dict(self) -> dict[str, Any]:
        """Return the state to continue from exactly, as something that pickles (``torch.save``).

        That is what was counted, and of each worker the weights, the environment, the trajectory,
        the random state of its process, and a batch that was not taken yet:
        workers finish their batches first. Environments without ``save_state`` (see
        `sync_collector.envs.Env`) will begin new episodes, of which a warning tells now. The random
        state of this process and the trainer's own policy are the caller's to save. After the last
        batch there are counts only.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
        """
        return self._at_rest(self._state.save, whole_batches=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave, here or in another process.

        Batches that were made before and not taken yet are dropped. Workers act with the weights
        that they had, until the next update. Versions only grow: a collector that is ahead of the
        state continues from its own.

        Args:
            state_dict: the state, of a collector with as many workers, whose batches have as many
                frames.

        Raises:
            ValueError: it is that of another kind of collector; nothing was done.
        """
        self._check_working()
        self._at_rest(lambda: self._state.load(state_dict))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers; batches under way are lost. Doing so again does nothing.

        Args:
            timeout: seconds for the workers to end by themselves; None for the collector's.
        """
        seconds = self._timeout if timeout is None else check_seconds(timeout)
        self._background.abandon()
        self._relay.close()
        if self._close.detach() is not None:
            _end(
                self._pool,
                self._weights,
                self._elsewhere,
                self._evaluator,
                self._reporter,
                timeout=seconds,
            )
        self._background.end(seconds)

    async def async_shutdown(self) -> None:
        """`shutdown`, while other tasks of the event loop continue."""
        await asyncio.to_thread(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __len__(self) -> int:
        """Return how many batches there are in all, those delivered included.

        Raises:
            TypeError: the number is unknown: there is no end, or batches differ in size.
        """
        return self._delivery.count_batches()

    def __bool__(self) -> bool:
        return True

    def _check_open(self) -> None:
        self._background.check()
        if not self._close.alive:
            after = " after its last batch" if self._delivery.wanted == 0 else ""
            raise ClosedError(f"the collector was shut down{after}; make a new one")

    def _check_working(self) -> None:
        self._check_open()
        if self._pool.dismissed:
            raise ClosedError(
                "the collector has delivered all its frames and ended its workers; make a new one "
                "with more total_frames"
            )

    def _at_rest(self, function: Callable[[], Result], *, whole_batches: bool = False) -> Result:
        """Do something while every worker lives, none is at work, and none comes or goes.

        Args:
            function: what to do; again, if a worker has died in it and was replaced.
            whole_batches: let none be in the middle of a batch either, after Ctrl-C.
        """

        def do() -> Result:
            with self._pool.lock:
                if whole_batches:
                    self._state.finish_batches()
                with self._requests.settled():
                    # A version that was sent and not committed belongs to the workers' weights.
                    self._weights.let_end(self._timeout)
                    return function()

        self._check_open()
        with self._background.paused(self._timeout):
            return self._pool.repeat(do)


def _end(
    pool: WorkerPool,
    weights: ModelWeights,
    held: ModelsElsewhere,
    evaluator: Evaluator,
    reporter: StatsLogger,
    *,
    timeout: float | None = None,
) -> None:
    """End workers, senders and what else belongs to a collector, come what may."""
    with closing(reporter), closing(evaluator):
        try:
            # A refresh may have been sent just now; its workers have it in a moment.
            weights.let_end(LET_END if timeout is None else min(LET_END, timeout))
            pool.stop(timeout)
        except BaseException:
            # Such as a second Ctrl-C: end without waiting, and leave nothing behind.
            pool.stop(0.0)
            raise
        finally:
            weights.close()
            held.close()
