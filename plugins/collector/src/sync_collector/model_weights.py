"""The weights of a collector's models, on their way from the trainer to the workers' copies."""

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
# A call of a worker: `WorkerPool.request`, or `WorkerPool.call` for one that has not joined.
_Call: TypeAlias = Callable[..., Future[bool]]

# How long a worker that was asked for a version waits for it before it is asked again, in seconds:
# no longer, since Ctrl-C may have taken the version back.
_PATIENCE = 0.1


class ModelWeights:
    """A sender for each model, and the workers that commit what these send.

    A worker with a single model commits it between two steps, or at once where it rests. Several
    are committed between two batches, all that an update names or none: all sources are read and
    checked before anything is sent, and each worker is notified which versions belong together.

    Args:
        pool: the workers.
        requests: the batches that they are asked for.
        schemes: the scheme of each model.
        collector: what senders are to know as their collector; weak, so that it can be forgotten.
        policy: the trainer's policy; None if there is none, or if workers make theirs.
        models: what the trainer has beside it; a model that is not among them is sent when its
            weights are given.
        made_by_workers: whether workers have policies that the trainer has not seen.
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
        #: The model whose versions are those of the policy: its only part, if that alone is sent.
        self.counted = only if self._single and is_part(only) else POLICY
        self._collector = collector
        self._made_by_workers = made_by_workers
        self._timeout = timeout
        # The count of versions where no sender counts them.
        self._version = 0
        # The update that was not waited for.
        self._pending: PendingSend | None = None
        # What each model was sent last, and which of that went to some workers only: a new worker
        # must have it too. Of such, the values that were sent, unless updates are automatic: the
        # trainer may be in the middle of a step when the worker joins.
        self._last: dict[str, Any] = {}
        self._of_some: set[str] = set()
        # For a worker that got only what went to all: the newest version of each model, or weights
        # that workers began or continue with; and its version of the policy.
        self._of_all: dict[str, int] = {}
        self._unsent: Weights = {}
        self._common_version = 0
        self.senders: dict[str, Sender] = {}
        self._group = SendGroup(self.senders)
        #: How long the last update took, in seconds.
        self.seconds = 0.0
        #: The versions that went to each worker with what was sent last, by model.
        self.required: Mapping[int, Mapping[str, int]] = {}
        #: Called with the workers that an update is sent to, once it is sent.
        self.on_update: list[Callable[[Sequence[int]], None]] = []
        #: The trainer's models, by name.
        self.models = dict(models)
        shared = POLICY in schemes and shares_policy(schemes[POLICY].scheme)
        # A function that shares the trainer's modules needs no weights, whichever they are.
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
        """The newest version of the policy, as its sender counts, or that of its only part."""
        sender = self.senders.get(self.counted)
        return self._version if sender is None else sender.version

    def advance(self, version: int) -> None:
        """Count on from a version of the policy, unless the count is beyond that."""
        with self._pool.lock:
            sender = self.senders.get(self.counted)
            if sender is not None:
                sender.advance(max(version, sender.version))
            self._version = max(version, self._version)

    def increment_version(self) -> None:
        """Count a version of the policy that reached the workers another way."""
        # A worker that joins meanwhile learns it when it joins, or with all others.
        with self._pool.lock:
            self.advance(self.version + 1)
            self._common_version = self.version
            self._pool.call_all(CollectorWorker.set_version, self.version)
            self._notify(self._pool.ids)

    def update(
        self, given: Mapping[str, Any], worker_ids: int | Iterable[int] | None, *, blocking: bool
    ) -> SendReport | PendingSend:
        """Send weights, and let the workers commit them.

        Args:
            given: weights by the name of their model, None for the trainer's own; empty for those
                of all models.
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

        None where there is nothing to wait for.
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
        """Let workers that join act with these weights, as the others do from now on.

        Args:
            weights: of each model.
            version: the version of the policy's.
        """
        with self._pool.lock:
            self._unsent, self._common_version = weights, version
            self._last, self._of_some = {}, set()

    def let_end(self, timeout: float) -> None:
        """Give an update that was not waited for some seconds; its result is logged."""
        # Another thread that has the lock sees it through.
        if self._pending is None or not self._pool.lock.acquire(timeout=timeout):
            return
        try:
            self._see_through(timeout)
        finally:
            self._pool.lock.release()

    def close(self) -> None:
        """Release what the senders hold."""
        self._group.close()

    def _begin(
        self, given: Mapping[str, Any], worker_ids: int | Iterable[int] | None
    ) -> PendingSend | None:
        """Send weights; None where there are none, so that every worker has the newest."""
        self._see_through()
        self._pending = None
        for sender in self.senders.values():
            # Ctrl-C may have interrupted it before it was recorded here.
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
        """Wait for the update that was not waited for; its result is logged."""
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
            # A worker in quarantine commits nothing before it is waited for again.
            ids = [i for i in ids if self._pool.waits_for(i)]
        # The report has the version of the first.
        named = {name: weights[name] for name in sorted(weights, key=lambda name: name != POLICY)}
        pending = self._group.send_async(named, ids)
        try:
            versions = {name: self.senders[name].version for name in weights}
            self._note(versions if pending.worker_ids else {}, weights, pending.worker_ids)
            if not self._single:
                for delivery in pending.deliveries.values():
                    # Also where the scheme has answered for the worker, which has to know of it.
                    self._request_commit(delivery, versions, call)
        except BaseException as error:
            pending.interrupt(error)
            raise
        return pending

    def _note(
        self, sent: Mapping[str, int], weights: Mapping[str, Any], ids: Sequence[int]
    ) -> None:
        """Note what a worker that joins must have, and what the next batches require.

        Args:
            sent: the version of each model that was sent.
            weights: what it was sent as.
            ids: the workers.
        """
        self.required = dict.fromkeys(ids, sent)
        # Weights of a whole policy are newer than all that its parts were sent before.
        older = set(filter(is_part, {*self._last, *self._of_all})) - sent.keys()
        replaced = {*sent, *(older if POLICY in sent else ())}
        self._last = {n: given for n, given in self._last.items() if n not in replaced}
        self._last |= {name: weights[name] for name in sent}
        self._of_some -= replaced
        if not set(ids) >= set(self._pool.ids):
            self._of_some |= sent.keys()
            return
        self._of_all = {n: v for n, v in self._of_all.items() if n not in replaced} | dict(sent)
        # Weights sent for the policy are newer than those its parts began with.
        self._unsent = {
            name: weights
            for name, weights in self._unsent.items()
            if name not in sent and not (POLICY in sent and is_part(name))
        }
        self._common_version = sent.get(self.counted, self._common_version)

    def _keep_sent(self) -> None:
        """Copy what was sent just now and may be sent again, to a worker that joins."""
        for name in next(iter(self.required.values()), {}):
            # A part that all have is sent again after a policy that only some have.
            if name in self._of_some or (is_part(name) and POLICY in self._of_some):
                weights, own = self._last[name], self.senders[name].snapshot
                self._last[name] = own() if weights is None else detached_copy(weights)

    def _request_commits(self, pending: PendingSend, call: _Call) -> None:
        """Have workers commit a single model: those at rest now, others after their batch.

        A worker in the middle of a batch commits on its own, but for weights that come with its
        last step; so do those whose scheme notifies them while they rest.
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
        # One that works in this thread gets it all at once, or not at all.
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
        """Connect models whose first weights were given; False if the policy has no weights."""
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
        # Each model comes by its own sender, also where the policy refers to it in a list.
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
        """Serve a worker that is new, or that has taken the place of another."""
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
            # Parts of the policy were sent weights since, which what it begins with would replace.
            parts = tuple(n for n in self._of_all if is_part(n) and n not in self._unsent)
            # What went to all is not to come after the weights to begin with.
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
                # In the order in which they were sent: a part is committed after its policy.
                last = {name: sent for name, sent in self._last.items() if name in lacking}
                self._send_last(worker_id, last)

    def _send_last(self, worker_id: int, weights: Mapping[str, Any]) -> None:
        """Send a worker what models were sent last, and what it does not have."""
        pending = self._send(weights, (worker_id,), self._pool.call)
        try:
            if self._single:
                self._request_commits(pending, self._pool.call)
            pending.wait()
        except BaseException as error:
            pending.interrupt(error)
            raise

    def _leave(self, worker_id: int) -> None:
        """Serve a worker no longer."""
        with self._pool.lock:
            self._see_through()
            self._pending = None
            for sender in self.senders.values():
                # One that could not join may not be there.
                if worker_id in sender.all_worker_ids():
                    sender.remove_worker(worker_id)
