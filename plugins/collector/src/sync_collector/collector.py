"""Collects experience with worker processes, and keeps their policies up to date."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Self, TypeVar, Unpack

from tensordict import TensorDictBase

from sync_collector.arguments import Arguments, check_names
from sync_collector.auto_update import AttributeWatch, AutoUpdate, StaleWatch
from sync_collector.background import BackgroundCollection
from sync_collector.batch_requests import BatchRequests, RandomFrames
from sync_collector.delivery import LET_END, BatchDelivery, CollectorStats, ReplayBuffer
from sync_collector.envs.gym import EnvOptions, InfoKeys
from sync_collector.evaluation import Evaluation, Evaluator
from sync_collector.model_weights import ModelWeights
from sync_collector.options import BatchOptions, WorkerOptions
from sync_collector.relay import PolicyRelay
from sync_collector.reporting import StatsLogger
from sync_collector.schedules import FirstReady, Synchronous
from sync_collector.schemes import ModelsElsewhere
from sync_collector.state import State
from sync_collector.torchrl_names import TorchRLArguments, TorchRLNames
from sync_collector.worker_pool import OnWorkerFailure, WorkerPool, warn_if_rounded
from sync_core import ClosedError, Sender, WorkerGroup
from sync_core.checks import check_integer, check_seconds, normalize
from sync_core.transports import release_with
from sync_plugin_std.workers import preload

preload("sync_collector.collector_worker")

Result = TypeVar("Result")


class Collector(TorchRLNames):
    """Runs a policy in environments on workers, and yields batches of frames as TensorDicts.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> with Collector(CountingEnv, scheme="none", frames_per_batch=4, total_frames=8) as c:
        ...     [batch["observation"].flatten().tolist() for batch in c]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 0.0, 1.0, 2.0]]

    With ``sync=True``, each batch has a part from every worker, made between two iterations with
    the newest weights; batches have the shape ``[num_workers, frames_per_batch // num_workers]``.
    Otherwise each batch comes from one worker, the first that is ready, and has the shape
    ``[frames_per_batch]``. A worker with its own process or thread begins its next batch at once,
    while the trainer learns. The last dimension is time, the only one with a name, ``"time"``. A
    worker that steps several environments together adds a dimension before it.

    A frame holds the policy's inputs and outputs, ``"next"`` with the outcome (the true observation
    also at the end of an episode), ``("collector", "traj_ids")``, unique over workers and time, and
    ``policy_version``. Environments reset automatically, so ``done`` at the root is always False.

    A collector is its own iterator: leaving a loop and starting another neither loses nor repeats
    frames. If ``postproc`` or the buffer raises, the same batch is passed to it again. The
    collector shuts down when ``total_frames`` are reached, or when a worker fails; a late batch
    (`WorkerTimeoutError`) does not shut it down.

    Args:
        create_env_fn: makes an environment (`sync_collector.envs.Env`, or one of Gymnasium's,
            single or vector); or a list, one for each worker.
        policy: takes a TensorDict or observations (`sync_collector.policies.adapt`); None for
            random actions. A policy that takes observations returns the action, ``(action,
            log_prob)`` or a dict with ``"action"``. Workers begin with a copy of the policy as it
            is now. If its class has a method ``on_commit(version)``, each worker calls it on its
            copy after each commit.
        policy_factory: makes a worker's policy in the worker; or a list, one for each worker. Only
            policies whose weights have the same names and shapes in every worker can be updated.
        frames_per_batch: the frames of a batch.
        total_frames: end as soon as this number of frames was yielded; -1 for never.
        sync: whether all workers together make each batch.

    Workers:
        num_workers: the number of workers; by default as many as the lists have entries, or 1.
        workers: the kind of worker: a worker group by name or class; by default the one that fits
            the scheme: the group of the scheme's name, else ``process`` if the scheme crosses
            processes, else ``inline``.
        worker_options: options of the worker group. In worker processes, torch uses one thread
            unless ``torch_threads`` is given.
        per_worker: how workers make batches: `WorkerOptions`, or a list with one for each.
        on_worker_failure: the reaction to a worker that dies, whose environment or policy raises,
            or that neither delivers a batch nor acknowledges an update within ``timeout``:
            ``"raise"`` an error that names it, and shut down, unless it is only late;
            ``"restart"``: a new worker begins new episodes in its place, with the newest weights;
            ``"drop"``: remove it; ``"quarantine"``: do not wait for it for one ``timeout``; each
            further failure doubles this time, up to 16 timeouts; a dead worker is removed.
        timeout: deadline of blocking calls and of waiting for a batch, in seconds.

    Weights:
        scheme: the scheme that delivers weights: its name, or a plugin object; ``"shm"`` by
            default.
        scheme_options: options of the scheme, and other arguments of its `Sender`.
        layers: layers that transform the weights on their way.
        zero_copy: let the workers' parameters be views of the received buffers.
        update_after_each_batch: update a worker before it begins its next batch; not for `start`.
        max_weight_update_interval: update a worker after this number of batches with the same
            weights; -1 for never.
        models: the trainer's models by name, except the policy; if a name is not a path in the
            worker, such as ``"critic"``, each worker gets a copy of the model.
        weight_sync_schemes: instead, several models by name, each with a scheme, or with a mapping
            that has ``"scheme"`` and its options. A name is a path in a worker: ``"policy"``,
            ``"policy.critic"``, ``"env.transform[0]"``. Workers commit several models together,
            between two batches. A mapping with the key ``"workers"`` is for a model that other
            workers hold, such as an actor of yours: ``{"critic": {"scheme": "ray", "workers":
            [actor]}}``. It is sent only when an update names it. Other keys are arguments of
            `Sender`, such as ``"model_id"``, by default the model's name.

    Environments and batches:
        info_keys: entries of Gymnasium's ``info`` to record, at the root and under ``"next"`` as
            observations are: names, or a mapping to dtypes; see `sync_collector.envs.GymEnv`.
        categorical: whether discrete actions and observations of Gymnasium are indices. By default,
            the policy may return one-hot vectors or indices; random actions and observations are
            one-hot.
        action_mask: the entry of the observation, or of ``info``, that has 1 for each allowed
            action; random actions respect it.
        replay_buffer: an object whose method ``extend`` gets each worker's data. The collector then
            yields None.
        batch: the contents of batches: `BatchOptions`.

    Logs:
        log_to: where to log `stats` after each batch, with the number of frames as the step: a
            TensorBoard ``SummaryWriter``, a run of W&B, or a function ``log(values, step)``.
            Implies ``BatchOptions(episode_stats=True)``.
        progress: show a progress bar, drawn by rich; implies ``episode_stats`` too.

    Other names:
        **torchrl: fields of the two option objects under their names in TorchRL; see
            `TorchRLArguments`.

    Raises:
        ValueError: arguments that do not go together.
        PluginError: the scheme or the worker group cannot be found or used.
        RemoteCallError: an environment or a policy could not be made; the message has the
            traceback.
        TypeError: an unknown argument, or a policy whose arguments or outputs do not fit the
            environment.
    """

    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        scheme: Any = None,
        scheme_options: Mapping[str, Any] | None = None,
        layers: Sequence[Any] = (),
        zero_copy: bool = False,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        models: Mapping[str, Any] | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        workers: str | type[WorkerGroup] | None = None,
        worker_options: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        sync: bool = False,
        info_keys: InfoKeys = (),
        categorical: bool | None = None,
        action_mask: str | None = None,
        replay_buffer: ReplayBuffer | None = None,
        batch: BatchOptions | None = None,
        per_worker: WorkerOptions | Sequence[WorkerOptions] | None = None,
        on_worker_failure: OnWorkerFailure = "raise",
        log_to: Any = None,
        progress: bool = False,
        timeout: float = 60.0,
        **torchrl: Unpack[TorchRLArguments],
    ) -> None:
        check_names(torchrl, Collector)
        checked = Arguments.checked(
            create_env_fn,
            policy,
            policy_factory=policy_factory,
            scheme=scheme,
            scheme_options=scheme_options,
            layers=layers,
            zero_copy=zero_copy,
            weight_sync_schemes=weight_sync_schemes,
            models=models,
            update_after_each_batch=update_after_each_batch,
            max_weight_update_interval=max_weight_update_interval,
            workers=workers,
            worker_options=worker_options,
            num_workers=num_workers,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            sync=sync,
            env_options=EnvOptions(
                info_keys=info_keys, categorical=categorical, action_mask=action_mask
            ),
            replay_buffer=replay_buffer,
            on_worker_failure=on_worker_failure,
            log_to=log_to,
            progress=progress,
            timeout=timeout,
            batch=batch,
            per_worker=per_worker,
            torchrl=torchrl,
        )
        self._timeout, self._specs = checked.timeout, checked.specs
        self._reporter = checked.reporter
        self._pool = WorkerPool(
            checked.group,
            checked.specs,
            checked.num_workers,
            checked.timeout,
            worker_options=checked.group_options,
            on_worker_failure=checked.on_worker_failure,
        )
        try:
            self._wire(checked)
        except BaseException:
            self._pool.stop()
            raise
        try:
            self.register_scheme_receiver(checked.receivers)
        except BaseException:
            self.shutdown()
            raise

    def _wire(self, checked: Arguments) -> None:
        """Connect the parts of the collector, after its workers have started."""
        pool, specs = self._pool, checked.specs
        warn_if_rounded(pool, specs.options[0].frames_per_batch)
        random = RandomFrames(pool, checked.random_frames, together=checked.sync)
        self._requests = BatchRequests(pool, checked.timeout, random)
        self._weights = ModelWeights(
            pool,
            self._requests,
            checked.schemes,
            collector=weakref.ref(self),
            policy=specs.policy,
            models=checked.own_models,
            made_by_workers=checked.made_by_workers,
            timeout=checked.timeout,
        )
        self._elsewhere = ModelsElsewhere(
            checked.elsewhere,
            checked.models,
            collector=weakref.ref(self),
            timeout=checked.timeout,
        )
        AttributeWatch(self._weights, {} if specs.share_policy else self._weights.models)
        self._relay = PolicyRelay(self._weights, pool)
        self._evaluator = Evaluator(specs, self._weights, self._relay.read_model)
        self._close = release_with(
            self, _end, pool, self._weights, self._elsewhere, self._evaluator, self._reporter
        )
        schedule = Synchronous if checked.sync else FirstReady
        updates_itself = specs.share_policy or checked.interval >= 0
        self._delivery = BatchDelivery(
            pool=pool,
            schedule=schedule(pool, self._requests),
            requests=self._requests,
            weights=self._weights,
            auto_update=AutoUpdate(checked.interval, pool, self._requests, self._weights),
            stale=StaleWatch(self._weights, {} if updates_itself else self._weights.models),
            output=checked.output,
            total_frames=checked.total_frames,
            observers=(self._reporter.report,) if self._reporter.enabled else (),
            close=self._close,
        )
        self._state = State(
            pool, self._requests, self._delivery, self._weights, random, checked.timeout
        )
        self._background = BackgroundCollection(self._delivery, self._relay.look)

    def stats(self) -> CollectorStats:
        """The counts of collected frames and batches, and the lag of policies."""
        self._background.check()
        return self._delivery.stats()

    def __iter__(self) -> Self:
        return self

    # Not Optional: every item is a TensorDict if there is no replay buffer.
    def __next__(self) -> TensorDictBase | Any:
        self._background.check(idle=True)
        self._relay.look()
        if self._delivery.wanted == 0:
            self.shutdown()
        return self._delivery.next_batch()

    def start(self) -> None:
        """Collect into the replay buffer on another thread; does nothing if it already does.

        Workers stay alive until `shutdown`, also after ``total_frames``. The next call of any
        method raises an error of the thread.

        Raises:
            RuntimeError: there is no replay buffer; or workers are updated automatically, which
                could happen in the middle of a training step.
            ClosedError: the collector was shut down.
        """
        self._check_open()
        self._background.start()

    def pause(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """For ``with``: put the batches under way into the replay buffer, and start no more.

        Collection continues when the block is left. Does nothing if no thread collects.

        Args:
            timeout: seconds for the batches under way; None for the collector's timeout.

        Raises:
            TimeoutError: the batches did not arrive in time.
        """
        seconds = self._timeout if timeout is None else check_seconds(timeout)
        return self._background.paused(seconds)

    @property
    def sender(self) -> Sender | None:
        """Return the policy's sender, or that of its part if only a part is sent.

        None before there are weights to send.
        """
        return self.senders.get(self._weights.counted)

    @property
    def senders(self) -> Mapping[str, Sender]:
        """Return the sender of each model that has weights to send."""
        return {**self._weights.senders, **self._elsewhere.senders}

    def evaluate(
        self,
        episodes: int = 10,
        *,
        deterministic: bool = True,
        weights: Any = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Evaluation:
        """Run episodes with the trainer's current policy, outside of collection.

        The calling thread runs a copy of the policy in another environment, made by the first
        function of ``create_env_fn``. Its frames are not counted. Worker processes continue
        meanwhile. Worker threads finish their batches and wait, because the exploration type and
        the random state belong to the whole process. The result is also logged to ``log_to``.

        Args:
            episodes: the number of episodes; environments that are stepped together share them
                equally.
            deterministic: act with ``exploration_type="deterministic"``. Policies of distributions
                follow it; others can read ``tensordict.nn.probabilistic.interaction_type()``.
            weights: a module, a TensorDict or a state_dict to act with; None for the trainer's own
                policy, or for the workers' weights if ``policy_factory`` makes the policies.
            seed: seed of the environment and of the policy's random numbers, to repeat the same
                episodes; None for different ones.
            timeout: seconds for all episodes; None for the collector's timeout.

        Raises:
            TimeoutError: not all episodes ended in time.
            LayoutMismatchError: the weights do not fit the policy.
            ClosedError: the collector was shut down before its last batch; or after it, if
                ``policy_factory`` made the policies and no ``weights`` are given.

        Example:
            >>> from sync_collector.envs import CountingEnv
            >>> with Collector(CountingEnv, scheme="none", frames_per_batch=4) as collector:
            ...     collector.evaluate(episodes=2).lengths
            (5, 5)
        """
        run = functools.partial(
            self._evaluator.evaluate,
            episodes,
            weights,
            deterministic=deterministic,
            seed=seed,
            timeout=self._timeout if timeout is None else timeout,
        )
        if not self._close.alive and self._delivery.wanted == 0:
            self._background.check()
            # After the last batch workers need not pause, and nothing else closes the environment.
            with closing(self._evaluator):
                result = run()
        else:
            self._check_open()
            result = self._at_rest(run) if self._evaluator.needs_rest else run()
        self._reporter.log_evaluation(result, self._delivery.stats().frames)
        return result

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        return self._pool.ids

    def add_workers(
        self,
        num_workers: int | None = None,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    ) -> tuple[int, ...]:
        """Start more workers, which have the newest weights from their first frame.

        With ``sync=True``, the next batch has one more row for each new worker.

        Args:
            num_workers: the number of new workers; None for the number of functions, or 1.
            create_env_fn: makes an environment; or a list, one for each new worker. None for the
                collector's own functions, beginning with the first.

        Returns:
            Their ids, never used before.

        Raises:
            RemoteCallError: an environment or a policy could not be made; workers that were added
                before the failure stay.
            ClosedError: the collector was shut down, or has delivered all its frames.

        Example:
            >>> from sync_collector import Collector
            >>> from sync_collector.envs import CountingEnv
            >>> with Collector(CountingEnv, scheme="none", frames_per_batch=4, sync=True) as c:
            ...     c.add_workers(2), next(c).batch_size
            ((1, 2), torch.Size([3, 4]))
        """
        self._check_working()
        return self._pool.add_workers(num_workers, create_env_fn)

    def remove_workers(self, worker_ids: int | Iterable[int]) -> None:
        """End some workers; batches not taken yet are lost and not counted.

        Raises:
            ValueError: no worker would be left; nothing was done.
            UnknownWorkerError: no such worker; nothing was done.
        """
        self._check_working()
        ids = normalize(worker_ids, self._pool.ids)
        if set(ids) == set(self._pool.ids):
            raise ValueError("no worker would be left; to end the collector, type shutdown()")
        for worker_id in ids:
            self._pool.remove(worker_id)
            self._requests.drop(worker_id)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the workers' environments, one after the other, and start new episodes.

        Each worker gets the seed that the one before it returned. Batches not taken yet are
        dropped, so all later frames were made after seeding. With the same seed and the same
        weights, each worker makes the same batches. Worker processes seed their whole random state.
        Other workers share the random state of this process: seed it yourself
        (``torch.manual_seed``) for a policy that draws from it. Several worker threads draw in an
        arbitrary order; a single thread, ``"process"`` and ``"inline"`` workers are deterministic.

        Args:
            seed: for the first worker.
            static_seed: give all workers the same seed.

        Returns:
            The seed that the last worker returned.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
        """
        seed = check_integer(seed, "seed", "give one such as 0")
        return self._at_rest(lambda: self._state.seed(seed, static_seed))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for an exact continuation, as a picklable object (``torch.save``).

        The state has the counts, and for each worker its weights, environment, trajectory, process
        random state and a batch not taken yet. Workers finish their batches first. Environments
        without ``save_state`` (see `sync_collector.envs.Env`) will begin new episodes; a warning
        says so now. The caller must save the random state of this process and the trainer's own
        policy. After the last batch the state has only the counts.

        Raises:
            WorkerTimeoutError: a worker was not ready in time.
        """
        return self._at_rest(self._state.save, whole_batches=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`, here or in another process.

        Batches not taken yet are dropped. Workers act with the weights in the state until the next
        update. Versions only grow: if the collector's version is newer than the state's, it is
        kept.

        Args:
            state_dict: the state of a collector with the same ``num_workers`` and
                ``frames_per_batch``.

        Raises:
            ValueError: the state does not fit this collector; nothing was done.
        """
        self._check_working()
        self._at_rest(lambda: self._state.load(state_dict))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers; batches under way are lost. Does nothing if already shut down.

        Args:
            timeout: seconds for the workers to exit on their own; None for the collector's timeout.
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

    def __repr__(self) -> str:
        schemes = [sender.scheme for sender in self._weights.senders.values()]
        stats = self._delivery.stats()
        return (
            f"<Collector schemes={schemes}, workers={len(self._pool.ids)}, "
            f"version={stats.version}, frames={stats.frames}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __len__(self) -> int:
        """Return the total number of batches, including those delivered.

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
        """Call a function while all workers live and are idle, and none is added or removed.

        Args:
            function: the function. It is called again if a worker died during the call and was
                replaced.
            whole_batches: first finish batches that Ctrl-C has interrupted.
        """

        def do() -> Result:
            with self._pool.lock:
                if whole_batches:
                    self._state.finish_batches()
                with self._requests.settled():
                    # Let a pending update end first: its version belongs to the workers' weights.
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
    """End the workers, senders and other parts of a collector, even if some of them raise."""
    with closing(reporter), closing(evaluator), closing(held), closing(weights):
        try:
            # A refresh may have been sent just now: give its workers a moment to commit it.
            weights.let_end(LET_END if timeout is None else min(LET_END, timeout))
            pool.stop(timeout)
        except BaseException:
            # For example a second Ctrl-C: end without waiting, and leave no process behind.
            pool.stop(0.0)
            raise
