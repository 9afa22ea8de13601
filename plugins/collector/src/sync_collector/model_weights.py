"""Sends the weights of a collector's models to the workers' copies."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch import Tensor, nn

from sync_collector.batch_requests import BatchRequests
from sync_collector.collector_worker import CollectorWorker, detached_copy
from sync_collector.policies import module_of
from sync_collector.schemes import POLICY, ModelScheme, is_part, layout_explained
from sync_collector.worker_pool import WorkerPool
from sync_core import (
    ClosedError,
    Delivery,
    ModelError,
    PendingSend,
    PendingSendError,
    Sender,
    SendError,
    SendReport,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_core.checks import normalize
from sync_core.models import modules_in, resolve
from sync_plugin_std import SendGroup
from sync_plugin_std.workers import gather, shares_policy

#: The weights of models, by their names.
Weights: TypeAlias = Mapping[str, Mapping[str, Tensor]]
# A call of a worker: `WorkerPool.request`, or `WorkerPool.call` for a worker that has not joined.
_Call: TypeAlias = Callable[..., Future[bool]]

# How long a worker waits for a requested version before it is asked again, in seconds. A longer
# wait would be in vain after Ctrl-C has withdrawn the version.
_PATIENCE = 0.1


class ModelWeights:
    """A sender for each model, and the workers that commit the sent weights.

    A worker with a single model commits new weights between two steps, or at once if it is idle.
    Several models are committed between two batches, all models of an update or none: all sources
    are read and checked before anything is sent, and each worker is notified which versions belong
    together.

    Args:
        pool: the workers.
        requests: the requests for batches.
        schemes: the scheme of each model.
        collector: a weak reference to the collector of the senders.
        policy: the trainer's policy; None if there is none, or if workers make theirs.
        models: the trainer's other models; a model that is missing here is sent when its weights
            are given.
        made_by_workers: whether workers make their own policies.
        timeout: deadline of blocking calls, in seconds.
    """

    def __init__(
        self,
        pool: WorkerPool,
        requests: BatchRequests,
        schemes: Mapping[str, ModelScheme],
        *,
        collector: weakref.ref[Any],
        policy: Any,
        models: Mapping[str, Any],
        made_by_workers: bool,
        timeout: float,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._schemes = schemes
        self._single = len(schemes) == 1
        only = next(iter(schemes))
        #: The model whose versions count as the policy's: the policy, or its part if only that is
        #: sent.
        self.counted = only if self._single and is_part(only) else POLICY
        self._collector = collector
        self._made_by_workers = made_by_workers
        self._timeout = timeout
        # The version of the policy if no sender counts it.
        self._version = 0
        # The update with ``blocking=False`` that has not been waited for.
        self._pending: PendingSend | None = None
        # The last weights sent of each model, and the models whose last version went only to some
        # workers: a new worker must get these too. For them the values are kept, unless updates are
        # automatic, because the trainer may be in the middle of a step when the worker joins.
        self._last: dict[str, Any] = {}
        self._of_some: set[str] = set()
        # For a new worker: the newest version of each model that went to all workers, the weights
        # that workers began or continued with, and the policy's version that belongs to these.
        self._of_all: dict[str, int] = {}
        self._unsent: Weights = {}
        self._common_version = 0
        self.senders: dict[str, Sender] = {}
        self._group = SendGroup(self.senders)
        #: How long the last update took, in seconds.
        self.seconds = 0.0
        #: For each worker, the versions in the last update, by model.
        self.required: Mapping[int, Mapping[str, int]] = {}
        #: Called with the workers of an update after it is sent.
        self.on_update: list[Callable[[Sequence[int]], None]] = []
        #: The trainer's models, by name.
        self.models = dict(models)
        shared = POLICY in schemes and shares_policy(schemes[POLICY].scheme)
        # A function that shares the trainer's modules needs no sender.
        if POLICY in schemes and not (shared and not isinstance(policy, nn.Module)):
            module = module_of(policy)
            if module is not None:
                self.models[POLICY] = module
        for name in schemes.keys() - self.models.keys():
            # A part of the policy, named by its path in a worker.
            if is_part(name) and policy is not None:
                self.models[name] = resolve(SimpleNamespace(policy=policy), name)
        for name, model in self.models.items():
            self._connect(name, model)
        if not shared:
            self._unsent = {name: sender.snapshot() for name, sender in self.senders.items()}
        pool.on_join.append(self._join)
        pool.on_leave.append(self._leave)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models."""
        return tuple(self._schemes)

    @property
    def version(self) -> int:
        """The policy's newest version, counted by its sender or the sender of its only part."""
        sender = self.senders.get(self.counted)
        return self._version if sender is None else sender.version

    def advance(self, version: int) -> None:
        """Raise the policy's version to this number, unless it is higher already."""
        with self._pool.lock:
            sender = self.senders.get(self.counted)
            if sender is not None:
                sender.advance(max(version, sender.version))
            self._version = max(version, self._version)

    def increment_version(self) -> None:
        """Count a new version of the policy, whose weights reached the workers another way."""
        # With the lock, a new worker gets the version either when it joins or with all others.
        with self._pool.lock:
            self.advance(self.version + 1)
            self._common_version = self.version
            self._pool.call_all(CollectorWorker.set_version, self.version)
            self._notify(self._pool.ids)

    def update(
        self, given: Mapping[str, Any], worker_ids: int | Iterable[int] | None, *, blocking: bool
    ) -> SendReport | PendingSend:
        """Send weights, and request that workers commit them.

        Args:
            given: weights by the name of their model, None for the trainer's own; empty for all
                models.
            worker_ids: the workers; None for all.
            blocking: wait until they have committed the weights.
        """
        with self._pool.lock:
            started = time.perf_counter()
            pending = self._begin(given, worker_ids)
            if pending is None:
                return SendReport(self.version, time.perf_counter() - started, {})
            try:
                self._keep_sent()
                if self._single:
                    self._request_commits(pending, self._pool.request)
                if not blocking:
                    self._pending = pending
                    return pending
                return pending.wait()
            except BaseException as error:
                if self._pending is None:
                    pending.interrupt(error)
                raise
            finally:
                self.seconds = time.perf_counter() - started

    def refresh(self, worker_ids: Sequence[int]) -> PendingSend | None:
        """Send the trainer's models to workers whose next batch will require them.

        Returns None if there is nothing to wait for.
        """
        with self._pool.lock:
            self._pending = self._begin({}, worker_ids)
            return self._pending

    def settle(self, pending: PendingSend) -> None:
        """Wait for the result of `refresh`.

        Raises:
            SendError: some workers could not be refreshed.
        """
        with self._pool.lock:
            if self._single:
                self._request_commits(pending, self._pool.request)
            pending.wait()

    def begin_with(self, weights: Weights, version: int) -> None:
        """Let all workers, including later ones, act with these weights.

        Args:
            weights: the weights of each model.
            version: the version of the policy's weights.
        """
        with self._pool.lock:
            self._unsent, self._common_version = weights, version
            self._last, self._of_some = {}, set()

    def let_end(self, timeout: float) -> None:
        """Wait for a pending update for some seconds, and log its result."""
        # A thread that holds the lock waits for the update itself.
        if self._pending is None or not self._pool.lock.acquire(timeout=timeout):
            return
        try:
            self._see_through(timeout)
        finally:
            self._pool.lock.release()

    def close(self) -> None:
        """Close the senders."""
        self._group.close()

    def _begin(
        self, given: Mapping[str, Any], worker_ids: int | Iterable[int] | None
    ) -> PendingSend | None:
        """Send weights; return None without weights, when every worker is up to date."""
        self._see_through()
        self._pending = None
        for sender in self.senders.values():
            # Ctrl-C may have interrupted the previous update before it was stored.
            with suppress(PendingSendError, SendError):
                sender.wait_async(timeout=0)
        weights = dict(given) or dict.fromkeys(self.models) or dict.fromkeys(self.names)
        ids = normalize(worker_ids, self._pool.ids)
        if not self._ensure_senders(weights):
            self._notify(ids)
            return None
        with layout_explained():
            pending = self._send(weights, ids, self._pool.request)
        self._notify(pending.worker_ids)
        return pending

    def _see_through(self, timeout: float | None = None) -> None:
        """Wait for the pending update, and log its result."""
        pending = self._pending
        if pending is None:
            return
        if self._single:
            self._request_commits(pending, self._pool.request)
        with suppress(SendError):
            pending.wait(timeout)

    def _notify(self, worker_ids: Sequence[int]) -> None:
        for callback in self.on_update:
            callback(worker_ids)

    def _send(self, weights: Mapping[str, Any], ids: Sequence[int], call: _Call) -> PendingSend:
        if not self._single:
            # A worker in quarantine commits nothing, so nothing is sent to it.
            ids = [i for i in ids if self._pool.waits_for(i)]
        # The report has the version of the first model.
        named = {name: weights[name] for name in sorted(weights, key=lambda name: name != POLICY)}
        pending = self._group.send_async(named, ids)
        try:
            versions = {name: self.senders[name].version for name in weights}
            self._note(versions if pending.worker_ids else {}, weights, pending.worker_ids)
            if not self._single:
                for delivery in pending.deliveries.values():
                    # Needed even if the scheme has acknowledged for the worker, which must learn
                    # the version.
                    self._request_commit(delivery, versions, call)
        except BaseException as error:
            pending.interrupt(error)
            raise
        return pending

    def _note(
        self, sent: Mapping[str, int], weights: Mapping[str, Any], ids: Sequence[int]
    ) -> None:
        """Record the weights for new workers, and the versions that the next batches require.

        Args:
            sent: the version of each model that was sent.
            weights: the weights of each model, as they were given.
            ids: the workers.
        """
        self.required = dict.fromkeys(ids, sent)
        # Weights of the whole policy replace older weights of its parts.
        older = set(filter(is_part, {*self._last, *self._of_all})) - sent.keys()
        replaced = {*sent, *(older if POLICY in sent else ())}
        self._last = {n: given for n, given in self._last.items() if n not in replaced}
        self._last |= {name: weights[name] for name in sent}
        self._of_some -= replaced
        if not set(ids) >= set(self._pool.ids):
            self._of_some |= sent.keys()
            return
        self._of_all = {n: v for n, v in self._of_all.items() if n not in replaced} | dict(sent)
        # Weights sent for the policy replace its parts' initial weights.
        self._unsent = {
            name: weights
            for name, weights in self._unsent.items()
            if name not in sent and not (POLICY in sent and is_part(name))
        }
        self._common_version = sent.get(self.counted, self._common_version)

    def _keep_sent(self) -> None:
        """Copy the weights just sent that may be sent again, to a new worker."""
        for name in next(iter(self.required.values()), {}):
            # A part that went to all is sent again after a policy that went only to some.
            if name in self._of_some or (is_part(name) and POLICY in self._of_some):
                weights, own = self._last[name], self.senders[name].snapshot
                self._last[name] = own() if weights is None else detached_copy(weights)

    def _request_commits(self, pending: PendingSend, call: _Call) -> None:
        """Ask workers to commit a single model: idle ones now, others after their batch.

        A worker commits on its own during a batch, except weights that arrive with its last step.
        Workers whose scheme notifies them also commit on their own while idle.
        """
        for worker_id, delivery in pending.unanswered.items():
            worker = self._pool.workers[worker_id]
            if not worker.commits_at_rest:
                versions = {self.names[0]: pending.version}
                request = partial(self._request_commit, delivery, versions, call)
                self._requests.at_rest(worker_id, request)

    def _request_commit(self, delivery: Delivery, versions: Mapping[str, int], call: _Call) -> None:
        if delivery.ended and self._single:
            return
        # An inline worker gets everything at once or nothing.
        again = self._single and self._pool.parallel
        patience = _PATIENCE if again else self._timeout
        try:
            requested = call(delivery.worker_id, CollectorWorker.reach, versions, patience)
        except ClosedError:
            delivery.fail(WorkerLostError(delivery.worker_id, "was stopped"))
            return
        requested.add_done_callback(partial(self._requested, delivery, versions, call))

    def _requested(
        self,
        delivery: Delivery,
        versions: Mapping[str, int],
        call: _Call,
        requested: Future[bool],
    ) -> None:
        error = requested.exception()
        if isinstance(error, WorkerError):
            delivery.fail(error)
        elif error is not None:
            if not self._single:
                delivery.fail(WorkerError(delivery.worker_id, str(error)))
        elif not requested.result():
            if not self._single:
                late = "was late: a newer update has come meanwhile"
                delivery.fail(WorkerTimeoutError(delivery.worker_id, late))
            elif self._pool.parallel:
                self._request_commit(delivery, versions, call)

    def _ensure_senders(self, weights: Mapping[str, Any]) -> bool:
        """Create missing senders; return False if the policy has no weights to send."""
        for name, given in weights.items():
            if name == POLICY and self._made_by_workers and given is None:
                raise ModelError(
                    "the workers' policies come from policy_factory, so the collector has no "
                    "weights of its own; type update_policy_weights_(weights)"
                )
            if name in self.senders:
                continue
            if name == POLICY and not self._made_by_workers:
                if given is None and self._single:
                    return False
                if given is not None:
                    raise ModelError(
                        f"there is nothing to load a {type(given).__name__} into: the collector's "
                        "policy is not a module with tensors; give Collector an nn.Module"
                    )
            if given is None:
                raise ModelError(
                    f"the collector has no weights of {name!r}; give them: "
                    f"update_policy_weights_(weights_dict={{{name!r}: …}})"
                )
            self._connect(name, given)
        return True

    def _connect(self, name: str, model: Any) -> None:
        ids = self._pool.ids
        chosen = self._schemes[name]
        # Each model has its own sender, even if the policy keeps it in a list.
        models = [each for other, each in self.models.items() if other != name]
        others = [module for each in models for _, module in modules_in(each)]
        allowed = chosen.arguments.get("allow_unregistered", ())
        arguments = {**chosen.arguments, "allow_unregistered": [*others, *allowed]}
        sender = Sender(
            chosen.scheme,
            model,
            num_workers=max(ids) + 1,
            model_id=name,
            timeout=self._timeout,
            version=self._version if name == self.counted else 0,
            on_failure="quarantine" if self._single and self._pool.quarantines else "raise",
            **arguments,
        )
        try:
            sender.register_collector(self._collector())
            for worker_id in set(sender.all_worker_ids()) - set(ids):
                sender.remove_worker(worker_id)
            calls = {
                i: self._pool.request(
                    i, CollectorWorker.connect, name, sender.address(i), self._single
                )
                for i in ids
            }
            at_rest = gather(calls, self._timeout, f"connect to the sender of {name!r}")
        except BaseException:
            sender.close()
            raise
        for worker_id, commits in zip(calls, at_rest, strict=True):
            self._pool.workers[worker_id].commits_at_rest = commits
        self.senders[name] = sender

    def _join(self, worker_id: int) -> None:
        """Send the newest weights to a worker that is new or replaces another."""
        with self._pool.lock:
            self._see_through()
            self._pending = None
            for name, sender in self.senders.items():
                if worker_id in sender.all_worker_ids():
                    sender.remove_worker(worker_id)
                sender.add_worker(worker_id)
                self._pool.workers[worker_id].commits_at_rest = self._pool.gather_one(
                    worker_id,
                    f"connect to the sender of {name!r}",
                    CollectorWorker.connect,
                    name,
                    sender.address(worker_id),
                    self._single,
                    joins=True,
                )
            # Parts of the policy that were sent since: the initial weights must not overwrite them.
            parts = tuple(n for n in self._of_all if is_part(n) and n not in self._unsent)
            # Weights that went to all must not arrive after the initial weights.
            comes = all(
                self.senders[name].workers[worker_id].wanted >= version
                for name, version in self._of_all.items()
            )
            reached = comes and self._pool.gather_one(
                worker_id,
                "commit the newest weights",
                CollectorWorker.reach,
                self._of_all,
                self._timeout,
                joins=True,
            )
            self._pool.gather_one(
                worker_id,
                "load the weights to begin with",
                CollectorWorker.begin_with,
                self._unsent,
                self._common_version,
                parts,
                joins=True,
            )
            lacking = set(self._of_some if reached else self._last)
            if POLICY in lacking:
                lacking.update(filter(is_part, self._last))
            if lacking:
                # In the order of sending: a part is committed after its policy.
                last = {name: sent for name, sent in self._last.items() if name in lacking}
                self._send_last(worker_id, last)

    def _send_last(self, worker_id: int, weights: Mapping[str, Any]) -> None:
        """Send a worker the last weights of the models that it lacks."""
        pending = self._send(weights, (worker_id,), self._pool.call)
        try:
            if self._single:
                self._request_commits(pending, self._pool.call)
            pending.wait()
        except BaseException as error:
            pending.interrupt(error)
            raise

    def _leave(self, worker_id: int) -> None:
        """Stop serving a worker."""
        with self._pool.lock:
            self._see_through()
            self._pending = None
            for sender in self.senders.values():
                # A worker that could not join is not registered.
                if worker_id in sender.all_worker_ids():
                    sender.remove_worker(worker_id)
