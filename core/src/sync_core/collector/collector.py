"""Collects experience with workers, and keeps their policies fresh."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, overload

import torch
from tensordict import TensorDictBase

from sync_core.collector.factory import RolloutFactory, one_per_worker
from sync_core.collector.groups import choose_group, shares_policy
from sync_core.collector.requests import gather
from sync_core.collector.rollout import Rollout, RolloutOptions
from sync_core.collector.schedules import FirstReady, Schedule, Synchronous
from sync_core.collector.stats import CollectorStats
from sync_core.collector.weights import PolicyWeights
from sync_core.errors import ClosedError, RemoteCallError, WorkerLostError
from sync_core.pending import PendingSend
from sync_core.report import SendReport
from sync_core.sender import Sender
from sync_core.workers import WorkerGroup

_MODEL_ID = "policy"


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
        timeout: float = 60.0,
    ) -> None:
        if policy is not None and policy_factory is not None:
            raise ValueError("give either policy or policy_factory, not both")
        if num_workers is None:
            num_workers = 1 if callable(create_env_fn) else len(create_env_fn)
        _check_frames(frames_per_batch, total_frames, num_workers, sync=sync)
        group_class = choose_group(scheme, workers)
        in_process = "cross_process" not in group_class.capabilities
        factory = RolloutFactory(
            env_fns=one_per_worker(create_env_fn, num_workers, "create_env_fn"),
            policy=policy,
            policy_fns=()
            if policy_factory is None
            else one_per_worker(policy_factory, num_workers, "policy_factory"),
            share_policy=shares_policy(scheme),
            seed=int(torch.randint(2**31, ()).item()),
            one_thread="torch_threads" not in (worker_options or {}),
            options=RolloutOptions(
                frames_per_batch=frames_per_batch // num_workers if sync else frames_per_batch,
                track_policy_version=track_policy_version,
                owns_process=not in_process,
            ),
        )
        self._total_frames = total_frames
        self._timeout = timeout
        self._frames = self._batches = self._lag = 0
        self._group = group_class(factory, num_workers, timeout=timeout, **(worker_options or {}))
        try:
            _warn_if_rounded(self._group, factory.options.frames_per_batch, timeout)
            self._weights = PolicyWeights(
                self._group,
                lambda model: Sender(
                    scheme,
                    model,
                    num_workers=num_workers,
                    model_id=_MODEL_ID,
                    layers=layers,
                    zero_copy=zero_copy,
                    timeout=timeout,
                    **(scheme_options or {}),
                ),
                policy,
                made_by_workers=policy_factory is not None,
                timeout=timeout,
            )
        except BaseException:
            self._group.stop()
            raise
        self._schedule: Schedule = (
            Synchronous(self._group, timeout)
            if sync
            else FirstReady(self._group, frames_per_batch, timeout)
        )
        self._close = weakref.finalize(self, _close, self._group, self._weights)

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers."""
        return self._group.worker_ids

    @property
    def sender(self) -> Sender | None:
        """What sends the weights; None as long as there are none to send."""
        return self._weights.sender

    def stats(self) -> CollectorStats:
        """What was collected so far, and how fresh the policies are."""
        return CollectorStats(
            frames=self._frames,
            batches=self._batches,
            version=self._weights.version,
            lag=self._lag,
            sync_seconds=self._weights.seconds,
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDictBase:
        if not self._close.alive:
            raise StopIteration
        wanted = None if self._total_frames < 0 else self._total_frames - self._frames
        if wanted is not None and wanted <= 0:
            self.shutdown()
            raise StopIteration
        try:
            batch = self._schedule.next_batch(wanted)
        except (RemoteCallError, WorkerLostError):
            self.shutdown()
            raise
        self._frames += batch.numel()
        self._batches += 1
        if "policy_version" in batch:
            self._lag = self._weights.version - int(batch["policy_version"].min())
        return batch

    def next(self) -> TensorDictBase | None:
        """The next batch, or None at the end."""
        return next(self, None)

    @overload
    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        model_id: str | None = None,
        blocking: Literal[True] = True,
    ) -> SendReport: ...

    @overload
    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        model_id: str | None = None,
        blocking: bool,
    ) -> SendReport | PendingSend: ...

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        model_id: str | None = None,
        blocking: bool = True,
    ) -> SendReport | PendingSend:
        """Send the policy's weights as a new version, and let the workers commit them.

        A worker commits between two batches: one that is in the middle of a batch finishes it
        first, and a blocking call waits for that.

        Args:
            policy_or_weights: a module, a TensorDict or a state_dict; None for the policy that
                the collector was made with.
            weights: the same, by another name.
            policy: likewise.
            worker_ids: one worker or several; None for all.
            model_id: the name of the model; there is only ``"policy"``.
            blocking: wait until the workers have committed the version. Otherwise wait for what is
                returned, before the next update.

        Raises:
            SendError: some workers do not have the version; the others do.
            ModelError: there are no weights to send, or no policy to load them into.
            KeyError: a model that there is not.
            ClosedError: the collector was shut down.
        """
        if not self._close.alive:
            raise ClosedError("the collector was shut down; make a new one")
        if model_id not in (None, _MODEL_ID):
            raise KeyError(f"there is no model {model_id!r}; the models are: {_MODEL_ID!r}")
        given = [w for w in (policy_or_weights, weights, policy) if w is not None]
        if len(given) > 1:
            raise ValueError("give one of policy_or_weights, weights and policy, not several")
        return self._weights.update(given[0] if given else None, worker_ids, blocking=blocking)

    def set_seed(self, seed: int) -> int:
        """Seed the workers' environments, one after the other, and begin their episodes anew.

        Each worker gets the seed that the one before it returned. Workers with a process of their
        own seed their whole random state; others leave this process's to the caller. Best called
        before the first batch: one that is under way is finished first.

        Returns:
            The seed that the last worker returned.
        """
        if not self._close.alive:
            raise ClosedError("the collector was shut down; make a new one")
        for worker_id in self._group.worker_ids:
            call = self._group.call(worker_id, Rollout.set_seed, seed)
            (seed,) = gather({worker_id: call}, self._timeout, "set its seed")
        return seed

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers; batches under way are lost. Doing so again does nothing.

        Args:
            timeout: seconds for the workers to end by themselves; None for the collector's.
        """
        if self._close.detach() is not None:
            _close(self._group, self._weights, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _close(group: WorkerGroup, weights: PolicyWeights, timeout: float | None = None) -> None:
    group.stop(timeout)
    weights.close()


def _check_frames(
    frames_per_batch: int, total_frames: int, num_workers: int, *, sync: bool
) -> None:
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; give 1 or more")
    if frames_per_batch < 1:
        raise ValueError(f"frames_per_batch is {frames_per_batch}; give 1 or more")
    if total_frames < -1:
        raise ValueError(f"total_frames is {total_frames}; give -1 for no end")
    if sync and frames_per_batch % num_workers:
        raise ValueError(
            f"frames_per_batch={frames_per_batch} cannot be divided among {num_workers} workers; "
            f"give a multiple of {num_workers}, for example "
            f"{frames_per_batch + num_workers - frames_per_batch % num_workers}"
        )


def _warn_if_rounded(group: WorkerGroup, frames: int, timeout: float) -> None:
    calls = {i: group.call(i, Rollout.frames_per_batch) for i in group.worker_ids}
    for worker_id, actual in zip(calls, gather(calls, timeout, "answer"), strict=True):
        if actual != frames:
            warnings.warn(
                f"worker {worker_id} makes batches of {actual} frames instead of {frames}, a "
                "multiple of the number of environments that it steps together",
                stacklevel=3,
            )
