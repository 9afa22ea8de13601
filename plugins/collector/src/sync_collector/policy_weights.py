"""Takes new weights from the trainer's policy to the copies that the workers act with."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias

from torch import Tensor, nn

from sync_collector.collector_worker import CollectorWorker
from sync_collector.policy_module import module_of
from sync_collector.schemes import POLICY
from sync_collector.worker_pool import WorkerPool
from sync_core import (
    ModelError,
    PendingSend,
    PendingSendError,
    Sender,
    SendError,
    SendReport,
    WorkerError,
)
from sync_core.workers import gather, normalize

# How long a worker at rest waits for weights that come later than the call that announces them.
_PATIENCE = 0.1
# Seconds for a worker to commit on its own, before it is asked to.
_UNASKED = 0.02
# How often the driver looks whether a worker has to be asked again.
_GLANCE = 0.002


class CommitRequests:
    """Asks the workers of one send after the other.

    Args:
        pool: the workers.
        busy: whether a worker is at work on a batch.
    """

    def __init__(self, pool: WorkerPool, busy: Callable[[int], bool]) -> None:
        self._pool = pool
        self._busy = busy
        self._calls: dict[int, Future[bool]] = {}
        # The workers that commit what comes while they rest, and until when those that do so now
        # are not asked.
        self._attentive: set[int] = set()
        self._unasked: dict[int, float] = {}

    def learn(self, worker_id: int, *, attentive: bool) -> None:
        """Note whether a worker commits what arrives between its batches."""
        (self._attentive.add if attentive else self._attentive.discard)(worker_id)

    def begin(self, pending: PendingSend, *, all_workers: bool) -> None:
        """Ask the workers at rest that do not commit by themselves.

        Or all, where no caller may ask the others later.
        """
        unanswered = pending.unanswered
        at_rest = {i for i in unanswered if not self._busy(i)}
        until = time.monotonic() + _UNASKED
        self._unasked = {} if all_workers else dict.fromkeys(at_rest & self._attentive, until)
        asked = unanswered if all_workers else at_rest - self._attentive
        self._calls = {i: self._ask(i, pending) for i in asked}

    def leave_out(self) -> None:
        """Ask no worker: the next request for a batch says that it needs what was sent."""
        self._calls, self._unasked = {}, {}

    def see_through(self, pending: PendingSend, timeout: float) -> None:
        """Wait until every worker has answered, or that many seconds are over.

        A worker in the middle of a batch commits between two steps; one at rest when it is asked.
        """
        deadline = time.monotonic() + timeout
        while (unanswered := pending.unanswered) and time.monotonic() < deadline:
            for worker_id, delivery in unanswered.items():
                call = self._calls.get(worker_id)
                if call is None:
                    unasked_until = self._unasked.get(worker_id, 0.0)
                    if not self._busy(worker_id) and time.monotonic() >= unasked_until:
                        self._calls[worker_id] = self._ask(worker_id, pending)
                    continue
                if not call.done():
                    continue
                error = call.exception()
                if error is None:
                    if not call.result():
                        self._calls[worker_id] = self._ask(worker_id, pending)
                # The worker's own answer may still be in transfer, and says more.
                elif isinstance(error, WorkerError) and not delivery.wait(_PATIENCE):
                    delivery.fail(error)
            # The one that was offered its version last is likely to answer last.
            unanswered[max(unanswered)].wait(_GLANCE)

    def _ask(self, worker_id: int, pending: PendingSend) -> Future[bool]:
        """Let a worker commit now if it is at rest; if not, as soon as its batch is made.

        It will have done so before that, but for weights that came with its last step.
        """
        patience = 0.0 if self._busy(worker_id) else _PATIENCE
        return self._pool.request(worker_id, CollectorWorker.reach, pending.sent_version, patience)


#: The weights of models, by their names.
Weights: TypeAlias = Mapping[str, Mapping[str, Tensor]]
#: How long an update that was not waited for may delay the end of a collector, in seconds.
MOMENT = 0.5


class PolicyWeights:
    """A sender, and the workers whose receivers it feeds.

    Args:
        pool: the workers.
        busy: whether a worker is at work on a batch.
        make_sender: `Sender` with all arguments but the model and ``num_workers``.
        collector: what the sender is to know as its collector; weak, so that it can be forgotten.
        policy: the trainer's policy; None if there is none, or if workers make theirs.
        shared: whether workers act with that very object.
        made_by_workers: whether workers have policies that the trainer has not seen.
        timeout: deadline of blocking calls, in seconds.
    """

    def __init__(
        self,
        pool: WorkerPool,
        busy: Callable[[int], bool],
        make_sender: Callable[..., Sender],
        collector: weakref.ref[Any],
        policy: Any,
        *,
        shared: bool,
        made_by_workers: bool,
        timeout: float,
    ) -> None:
        self._pool = pool
        self._commit_requests = CommitRequests(pool, busy)
        self._make_sender = make_sender
        self._collector = collector
        self._made_by_workers = made_by_workers
        self._timeout = timeout
        self._increments = 0
        self._pending: PendingSend | None = None
        # The last weights sent, and whether they went to all workers: a new one must have them too.
        self._last: Mapping[str, Any] = {}
        self._last_to_all = True
        # The weights that workers began or continue with, until something is sent to all.
        self._unsent: Weights = {}
        self.sender: Sender | None = None
        self.seconds = 0.0
        #: The version of the policy that went to each worker with what was sent last.
        self.required: Mapping[int, int] = {}
        #: Called with the workers that an update is sent to, once it is sent.
        self.on_update: list[Callable[[Sequence[int]], None]] = []
        #: The trainer's policy, if it is a module, by its name.
        self.models: dict[str, Any] = {}
        self.names: tuple[str, ...] = (POLICY,)
        # A function that shares the trainer's modules needs no weights, whichever they are.
        model = None if shared and not isinstance(policy, nn.Module) else module_of(policy)
        if model is not None:
            self._connect(model)
            self.models[POLICY] = model
            self._unsent = {} if shared else snapshots(self.senders)
        pool.on_join.append(self._join)
        pool.on_leave.append(self._leave)

    @property
    def version(self) -> int:
        """The newest version."""
        return self._increments + (0 if self.sender is None else self.sender.version)

    def increment_version(self) -> None:
        """Count a version that reached the workers another way."""
        # A worker that joins meanwhile learns it once: when it joins, or with all others.
        with self._pool.lock:
            self._increments += 1
            self._pool.call_all(CollectorWorker.increment_version, 1)
            self._tell(self._pool.ids)

    @property
    def senders(self) -> dict[str, Sender]:
        """Return the senders, by name."""
        return {} if self.sender is None else {POLICY: self.sender}

    def refresh(self, worker_ids: Sequence[int]) -> PendingSend | None:
        """Send the policy's weights to workers whose next batch will require them.

        None where there is nothing to wait for.
        """
        with self._pool.lock:
            self._pending = self._begin({}, worker_ids)
            self._commit_requests.leave_out()
            return self._pending

    def settle(self, pending: PendingSend) -> None:
        """Wait for the outcome of `refresh`.

        Raises:
            SendError: some workers could not be refreshed.
        """
        with self._pool.lock:
            if pending is self._pending:
                self._commit_requests.see_through(pending, self._timeout)
            pending.wait()

    def update(
        self, given: Mapping[str, Any], worker_ids: int | Iterable[int] | None, *, blocking: bool
    ) -> SendReport | PendingSend:
        """Send the weights given, or the policy's, and let the workers commit them."""
        with self._pool.lock:
            started = time.perf_counter()
            pending = self._begin(given, worker_ids)
            if pending is None:
                return SendReport(self.version, time.perf_counter() - started, {})
            try:
                self._commit_requests.begin(pending, all_workers=not blocking)
                if not blocking:
                    self._pending = pending
                    return pending
                self._commit_requests.see_through(pending, self._timeout)
                return pending.wait()
            except BaseException as error:
                if self._pending is None:
                    pending.interrupt(error)
                raise
            finally:
                self.seconds = time.perf_counter() - started

    def restore(self, version: int) -> int:
        """Count on from another version, which workers are not told; by how many it is further."""
        with self._pool.lock:
            increments = version - self.version
            self._increments += increments
            return increments

    def begin_with(self, weights: Weights) -> None:
        """Let workers that join act with these weights, as the others do from now on."""
        with self._pool.lock:
            self._unsent, self._last_to_all = weights, True

    def let_end(self, timeout: float) -> None:
        """Give an update that was not waited for some seconds; its outcome is logged."""
        pending = self._pending
        # Another thread that has the lock sees it through.
        if pending is None or not self._pool.lock.acquire(timeout=timeout):
            return
        try:
            self._commit_requests.see_through(pending, timeout)
            with suppress(SendError):
                pending.wait(0)
        finally:
            self._pool.lock.release()

    def close(self) -> None:
        """Release what the sender holds."""
        if self.sender is not None:
            self.sender.close()

    def _begin(
        self, given: Mapping[str, Any], worker_ids: int | Iterable[int] | None
    ) -> PendingSend | None:
        weights = given.get(POLICY)
        self._end_last()
        self._ensure_sender(weights)
        if self.sender is None:
            # Random actions, or a policy without tensors: every worker has the newest weights.
            self._tell(normalize(worker_ids, self._pool.ids))
            return None
        pending = self.sender.send_async(weights, worker_ids)
        pending.count_as(pending.sent_version + self._increments)
        if pending.worker_ids:
            self._last = dict(given)
            self._last_to_all = set(pending.worker_ids) >= set(self._pool.ids)
            if self._last_to_all:
                self._unsent = {}
        self.required = dict.fromkeys(pending.worker_ids, pending.sent_version)
        self._tell(pending.worker_ids)
        return pending

    def _tell(self, worker_ids: Sequence[int]) -> None:
        for callback in self.on_update:
            callback(worker_ids)

    def _ensure_sender(self, weights: Any) -> None:
        if weights is None and self._made_by_workers:
            raise ModelError(
                "the workers' policies come from policy_factory, so the collector has no weights "
                "of its own; type update_policy_weights_(weights)"
            )
        if self.sender is not None or weights is None:
            return
        if not self._made_by_workers:
            raise ModelError(
                f"there is nothing to load a {type(weights).__name__} into: the collector's "
                "policy is not a module with tensors; give Collector an nn.Module"
            )
        self._connect(weights)

    def _end_last(self) -> None:
        """See an update through that was not waited for; its outcome is logged."""
        if self._pending is not None:
            self._commit_requests.see_through(self._pending, self._timeout)
            self._pending.abandon()
            self._pending = None
        end_interrupted(self.senders.values())

    def _connect(self, model: Any) -> None:
        ids = self._pool.ids
        sender = self._make_sender(model, num_workers=max(ids) + 1)
        try:
            sender.register_collector(self._collector())
            for worker_id in set(sender.all_worker_ids()) - set(ids):
                sender.remove_worker(worker_id)
            calls = {
                i: self._pool.request(i, CollectorWorker.connect, sender.address(i)) for i in ids
            }
            self._gather_connected(calls)
        except BaseException:
            sender.close()
            raise
        self.sender = sender

    def _gather_connected(self, calls: dict[int, Future[bool]]) -> None:
        attentive = gather(calls, self._timeout, "connect to the sender")
        for worker_id, commits_at_rest in zip(calls, attentive, strict=True):
            self._commit_requests.learn(worker_id, attentive=commits_at_rest)

    def _join(self, worker_id: int) -> None:
        """Serve a worker that is new, or that has taken the place of another."""
        with self._pool.lock:
            self._end_last()
            if self._increments:
                self._pool.call(worker_id, CollectorWorker.increment_version, self._increments)
            if self.sender is None:
                return
            if worker_id in self.sender.all_worker_ids():
                self.sender.remove_worker(worker_id)
            self.sender.add_worker(worker_id)
            address = self.sender.address(worker_id)
            self._gather_connected(
                {worker_id: self._pool.call(worker_id, CollectorWorker.connect, address)}
            )
            if self._last_to_all:
                # What went to all, if anything did, is not to come after the weights to begin with.
                self._reach(worker_id, self.sender.workers[worker_id].wanted)
            version = self.version if self._last_to_all else self._increments
            begun = self._pool.call(worker_id, CollectorWorker.begin_with, self._unsent, version)
            gather({worker_id: begun}, self._timeout, "load the weights to begin with")
            if self._last_to_all:
                return
            # A sender gives to new workers what went to all.
            pending = self.sender.send_async(self._last.get(POLICY), worker_id)
            try:
                if pending.worker_ids:  # a layer may hold it back
                    self._reach(worker_id, pending.sent_version)
                pending.wait()
            except BaseException as error:
                pending.interrupt(error)
                raise

    def _reach(self, worker_id: int, sent_version: int) -> None:
        call = self._pool.call(worker_id, CollectorWorker.reach, sent_version, self._timeout)
        gather({worker_id: call}, self._timeout, "commit the newest weights")

    def _leave(self, worker_id: int) -> None:
        """Serve a worker no longer."""
        with self._pool.lock:
            self._end_last()
            # One that could not join may not be there.
            if self.sender is not None and worker_id in self.sender.all_worker_ids():
                self.sender.remove_worker(worker_id)


def snapshots(senders: Mapping[str, Sender]) -> Weights:
    """Copies of the models of senders as they are now."""
    return {name: sender.snapshot() for name, sender in senders.items()}


def end_interrupted(senders: Iterable[Sender]) -> None:
    """End sends that Ctrl-C interrupted before they were recorded."""
    for sender in senders:
        with suppress(PendingSendError, SendError):
            sender.wait_async(timeout=0)
