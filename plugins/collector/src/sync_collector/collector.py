"""Collects experience with workers, and keeps their policies fresh."""

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
    """Runs a policy in environments on workers, and yields what they did as TensorDicts.

    Example:
        >>> from sync_collector.envs import CountingEnv
        >>> with Collector(CountingEnv, scheme="none", frames_per_batch=4, total_frames=8) as c:
        ...     [batch["observation"].flatten().tolist() for batch in c]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 0.0, 1.0, 2.0]]

    With ``sync=True``, all workers make a part of each batch, between two iterations and with the
    newest weights; batches have the shape ``[num_workers, frames_per_batch // num_workers]``.
    Otherwise each batch is one worker's, of the shape ``[frames_per_batch]``, the first that is
    ready, and a worker that runs on its own begins its next one at once, while the trainer
    learns. Environments that are stepped together put their dimension before the one of time,
    which is the last and the only one with a name, ``"time"``.

    A frame holds what the policy saw and did, ``"next"`` with the outcome (the true
    observation also where an episode ended), ``("collector", "traj_ids")``, unique over workers
    and time, and ``policy_version``. Environments reset automatically, so ``done`` at the root is
    always False.

    A collector is its own iterator: leaving a loop and beginning another loses and repeats
    nothing. If ``postproc`` or the buffer raises, the same batch is passed to it again. The
    collector shuts down when ``total_frames`` are reached, or when a worker fails; a late batch
    (`WorkerTimeoutError`) does not shut it down.

    Args:
        create_env_fn: makes an environment (`sync_collector.envs.Env`, or one of Gymnasium's,
            single or vector); or a list, one for each worker.
        policy: takes a TensorDict or observations (`sync_collector.policies.adapt`); None
            for random actions. One of observations returns the action, ``(action, log_prob)`` or a
            dict with ``"action"``. Workers begin with a copy of it as it is now. If its class
            has a method ``on_commit(version)``, a worker calls that of its copy after each commit.
        policy_factory: makes a worker's policy in the worker; or a list, one for each worker. Only
            policies whose weights have the same names and shapes in every worker can be updated.
        frames_per_batch: the frames of a batch.
        total_frames: end as soon as this number of frames was yielded; -1 for never.
        sync: whether a batch is made by all workers.

    Workers:
        num_workers: the number of workers; by default as many as the lists have entries, or 1.
        workers: the kind of worker: a worker group by name or class; by default the one that fits
            the scheme: the group of its name, else ``process`` if it crosses processes, else
            ``inline``.
        worker_options: options of the worker group. In workers with a process of their own, torch
            uses one thread unless ``torch_threads`` is among them.
        per_worker: how workers make batches: `WorkerOptions`, or a list with one for each.
        on_worker_failure: what is done about a worker that dies, whose environment or policy
            raises, or that gives neither a batch nor an answer to an update within ``timeout``:
            ``"raise"`` an error that names it, and shut down, unless it is only late;
            ``"restart"``: a new worker begins new episodes in its place, with the newest weights;
            ``"drop"``: remove it; ``"quarantine"``: do not wait for it for one ``timeout``, after
            each further failure for twice as long, up to 16; one that is dead is removed.
        timeout: deadline of blocking calls, in seconds; also of waiting for a batch.

    Weights:
        scheme: how weights travel: the name of a scheme, or a plugin object; ``"shm"`` by default.
        scheme_options: options of the scheme, and other arguments of its `Sender`.
        layers: layers for the weights on their way.
        zero_copy: let the workers' parameters be views of what arrives.
        update_after_each_batch: update a worker before it begins its next batch; not for `start`.
        max_weight_update_interval: update a worker after this many batches with the same
            weights; -1 for never.
        models: the trainer's models by name, except the policy; a name that is not a path in the
            worker, such as ``"critic"``, gives each worker a copy.
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
        categorical: whether discrete actions and observations of Gymnasium are indices. By default
            actions may be one-hot vectors or indices, as the policy gives them, and random ones
            and observations are one-hot.
        action_mask: the entry of the observation, or of ``info``, that has 1 for each action that
            is allowed; random actions keep to it.
        replay_buffer: has ``extend``, which gets what each worker makes. None is yielded then.
        batch: what batches have in them: `BatchOptions`.

    Logs:
        log_to: logs `stats` with each batch, at the number of frames: a TensorBoard
            ``SummaryWriter``, a run of W&B, or a function ``log(values, step)``. It implies
            ``BatchOptions(episode_stats=True)``.
        progress: show a progress bar, by rich; it implies ``episode_stats`` too.

    Other names:
        **torchrl: fields of the two option objects under the names that TorchRL gives them; see
            `TorchRLArguments`.

    Raises:
        ValueError: arguments that do not go together.
        PluginError: the scheme or the worker group cannot be found or used.
        RemoteCallError: an environment or a policy could not be made; it has the traceback.
        TypeError: an argument that there is not, or the policy's own arguments or outputs do not
            fit the environment.
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
        """Make the parts of the collector, whose workers have started."""
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
        """Return the policy's sender, or that of its part if that alone is sent.

        None as long as there are no weights to send.
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
            seed: of the environment and of what the policy draws, for the same episodes each time;
                None for new ones.
            timeout: seconds for all of them; None for the collector's.

        Raises:
            TimeoutError: not all episodes ended in time.
            LayoutMismatchError: weights that are others than the policy's.
            ClosedError: the collector was shut down before its last batch; or after it, where
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
            # After the last batch no worker needs to rest, and nothing else closes what this makes.
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
        return self._pool.add_workers(num_workers, create_env_fn)

    def remove_workers(self, worker_ids: int | Iterable[int]) -> None:
        """End some workers; batches that were not taken yet are lost, uncounted.

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
        """Call a function while all workers live and are idle, and none is added or removed.

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
    with closing(reporter), closing(evaluator), closing(held), closing(weights):
        try:
            # A refresh may have been sent just now; its workers have it in a moment.
            weights.let_end(LET_END if timeout is None else min(LET_END, timeout))
            pool.stop(timeout)
        except BaseException:
            # Such as a second Ctrl-C: end without waiting, and leave nothing behind.
            pool.stop(0.0)
            raise
