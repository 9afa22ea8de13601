"""Collects experience with workers, and keeps their policies fresh."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Self, Unpack, overload

import torch
from tensordict import TensorDictBase

from sync_core.collector.background import Background
from sync_core.collector.calls import gather
from sync_core.collector.crew import Crew, warn_if_rounded
from sync_core.collector.delivery import Delivery
from sync_core.collector.groups import choose_group, shares_policy
from sync_core.collector.host import Host
from sync_core.collector.options import (
    check_buffer,
    check_frames,
    check_policy,
    count_workers,
    factories,
)
from sync_core.collector.output import Output, ReplayBuffer
from sync_core.collector.recipe import Recipes
from sync_core.collector.requests import Requests
from sync_core.collector.rollout import RolloutOptions
from sync_core.collector.schedules import FirstReady, Synchronous
from sync_core.collector.stats import CollectorStats
from sync_core.collector.weights import MODEL_ID, Given, PolicyWeights, chosen
from sync_core.errors import ClosedError
from sync_core.pending import PendingSend
from sync_core.report import SendReport
from sync_core.sender import Sender
from sync_core.workers import WorkerGroup


class Collector:
    """Runs a policy in environments on workers, and yields what they did as TensorDicts.

    With ``sync=True``, all workers make a part of each batch, between two iterations and with the
    newest weights; batches have the shape ``[num_workers, frames_per_batch // num_workers]``.
    Otherwise each batch is one worker's, of the shape ``[frames_per_batch]``, the first that is
    ready, and a worker that can run by itself begins its next one at once, while the trainer
    learns. Environments that are stepped together put their dimension before the one of time,
    which is the last and the only one with a name, ``"time"``.

    A frame holds what the policy saw and did, ``"next"`` with what came of it (the true
    observation also where an episode ended), ``("collector", "traj_ids")``, unique over workers
    and time, and ``policy_version``. A new episode begins by itself where one ended, so ``done`` is
    False at the root, always.

    A collector is its own iterator: leaving a loop and beginning another loses and repeats
    nothing. When ``total_frames`` are reached it shuts down. An error from a worker shuts it down
    too; a late batch (`WorkerTimeoutError`) does not.

    Args:
        create_env_fn: makes an environment (`sync_core.envs.Env`); or a list, one for each worker.
        policy: takes a TensorDict or observations (`sync_core.collector.policies.adapt`); None
            for random actions. Workers begin with a copy of it as it is now.
        policy_factory: makes a worker's policy in the worker; or a list, one for each worker.
        scheme: how weights travel: the name of a scheme, or a plugin object.
        workers: what workers are: the name of a worker group, or its class. None for what suits
            the scheme: the group of its name, else ``process`` if it crosses processes, else
            ``inline``.
        num_workers: how many workers; by default as many as the lists have entries, or 1.
        frames_per_batch: the frames of a batch.
        total_frames: end as soon as so many frames were yielded; -1 for never.
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
        timeout: deadline of blocking calls, in seconds; also of waiting for a batch.

    Raises:
        ValueError: arguments that do not go together.
        PluginError: the scheme or the worker group cannot be found or used.
        RemoteCallError: an environment or a policy could not be made; it has the traceback.

    Example:
        >>> from sync_core.envs import CountingEnv
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
        scheme: Any = "shm",
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
        timeout: float = 60.0,
    ) -> None:
        group_class = choose_group(scheme, workers)
        shared = shares_policy(scheme)
        num_workers = count_workers(num_workers, create_env_fn)
        check_policy(policy, policy_factory, scheme, shares_policy=shared)
        check_frames(frames_per_batch, total_frames, num_workers, sync=sync)
        check_buffer(replay_buffer, extend_in_workers=extend_in_workers)
        output = Output(
            split_trajs=split_trajs,
            postproc=postproc,
            replay_buffer=replay_buffer,
            extend_in_workers=extend_in_workers,
        )
        recipes = Recipes(
            env_fns=factories(create_env_fn, num_workers, "create_env_fn"),
            policy=policy,
            policy_fns=(None,)
            if policy_factory is None
            else factories(policy_factory, num_workers, "policy_factory"),
            share_policy=shared,
            seed=int(torch.randint(2**31, ()).item()),
            one_thread="torch_threads" not in (worker_options or {}),
            options=RolloutOptions(
                frames_per_batch=frames_per_batch // num_workers if sync else frames_per_batch,
                track_policy_version=track_policy_version,
                owns_process="cross_process" in group_class.capabilities,
                deliver=output.in_worker if extend_in_workers else None,
            ),
        )
        self._timeout = timeout
        self._crew = Crew(group_class, recipes, num_workers, timeout, worker_options)
        try:
            warn_if_rounded(self._crew, recipes.options.frames_per_batch)
            self._requests = Requests(self._crew, timeout)
            self._weights = PolicyWeights(
                self._crew,
                self._requests.busy,
                partial(
                    Sender,
                    scheme,
                    model_id=MODEL_ID,
                    layers=layers,
                    zero_copy=zero_copy,
                    timeout=timeout,
                    **(scheme_options or {}),
                ),
                weakref.ref(self),
                policy,
                shared=shared,
                made_by_workers=policy_factory is not None,
                timeout=timeout,
            )
        except BaseException:
            self._crew.stop()
            raise
        self._close = weakref.finalize(self, _close, self._crew, self._weights)
        self._delivery = Delivery(
            schedule=(Synchronous if sync else FirstReady)(self._crew, self._requests),
            requests=self._requests,
            weights=self._weights,
            output=output,
            total_frames=total_frames,
            close=self._close,
        )
        self._background = Background(self._delivery)

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        return self._crew.ids

    @property
    def sender(self) -> Sender | None:
        """What sends the weights; None as long as there are none to send."""
        return self._weights.sender

    def stats(self) -> CollectorStats:
        """What was collected so far, and how fresh the policies are."""
        self._background.check()
        return self._delivery.stats()

    def __iter__(self) -> Self:
        return self

    # Not Optional: every batch is a TensorDict where there is no replay buffer.
    def __next__(self) -> TensorDictBase | Any:
        self._background.check(idle=True)
        if self._delivery.wanted == 0:
            self.shutdown()
        return self._delivery.next_batch()

    def next(self) -> TensorDictBase | None:
        """The next batch, or None at the end."""
        return next(self, None)

    def start(self) -> None:
        """Collect in the background, into the replay buffer; doing so again does nothing.

        Workers stay until `shutdown` when ``total_frames`` are reached. What goes wrong is raised
        by the next call of any method.

        Raises:
            RuntimeError: there is no replay buffer.
            ClosedError: the collector was shut down.
        """
        self._check_open()
        self._background.start()

    def pause(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """For ``with``: let what is under way come into the replay buffer, and nothing more.

        Leaving the block goes on. Where nothing runs in the background, nothing happens.

        Args:
            timeout: seconds to come to rest; None for the collector's.

        Raises:
            TimeoutError: it did not come to rest in time.
        """
        return self._background.paused(self._timeout if timeout is None else timeout)

    @overload
    def update_policy_weights_(
        self, policy_or_weights: Any = ..., *, blocking: Literal[True] = ..., **given: Unpack[Given]
    ) -> SendReport: ...

    @overload
    def update_policy_weights_(
        self, policy_or_weights: Any = ..., *, blocking: bool, **given: Unpack[Given]
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
        which frames were made with which weights.

        Args:
            policy_or_weights: a module, a TensorDict or a state_dict; None for the policy that
                the collector was made with.
            weights: the same, by another name.
            policy: likewise.
            worker_ids: one worker or several; None for all.
            model_id: the name of the model; there is only ``"policy"``.
            weights_dict: weights by the name of their model, instead of all the above.
            blocking: wait until the workers have committed the version. Otherwise what is
                returned tells; an update that is under way when the next one begins is waited
                for first.

        Raises:
            SendError: some workers do not have the version; the others do.
            ModelError: there are no weights to send, or no policy to load them into.
            KeyError: a model that there is not.
            ClosedError: the collector was shut down.
        """
        self._check_open()
        chosen_weights = chosen((policy_or_weights, weights, policy), model_id, weights_dict)
        return self._weights.update(chosen_weights, worker_ids, blocking=blocking)

    def increment_version(self) -> None:
        """Count a new version of the weights that reached the workers another way.

        Frames made from now on carry it.
        """
        self._check_open()
        self._weights.increment_version()

    def set_seed(self, seed: int) -> int:
        """Seed the workers' environments, one after the other, and begin their episodes anew.

        Each worker gets the seed that the one before it returned. Workers with a process of their
        own seed their whole random state; others leave this process's to the caller. Best called
        before the first batch: one that is under way is finished first.

        Returns:
            The seed that the last worker returned.
        """
        self._check_open()
        for worker_id in self._crew.ids:
            call = self._crew.call(worker_id, Host.set_seed, seed)
            (seed,) = gather({worker_id: call}, self._timeout, "set its seed")
        return seed

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers; batches under way are lost. Doing so again does nothing.

        Args:
            timeout: seconds for the workers to end by themselves; None for the collector's.
        """
        self._background.abandon()
        if self._close.detach() is not None:
            _close(self._crew, self._weights, timeout)
        self._background.end(self._timeout if timeout is None else timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _check_open(self) -> None:
        self._background.check()
        if not self._close.alive:
            raise ClosedError("the collector was shut down; make a new one")


def _close(crew: Crew, weights: PolicyWeights, timeout: float | None = None) -> None:
    crew.stop(timeout)
    weights.close()
