"""The weights of several models, each by its own scheme, committed together or not at all."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from sync_collector.collector_worker import CollectorWorker
from sync_collector.policy_module import module_of
from sync_collector.policy_weights import PolicyWeights, Weights, end_interrupted, snapshots
from sync_collector.requests import Requests
from sync_collector.schemes import POLICY, ModelScheme
from sync_collector.worker_pool import WorkerPool
from sync_core import (
    Delivery,
    ModelError,
    PendingSend,
    Sender,
    SendError,
    SendReport,
    WorkerError,
    WorkerTimeoutError,
)
from sync_core.workers import gather, normalize, shares_policy

# How much later than its worker a sender may learn that its weights have been committed.
_AFTERWARDS = 1.0


class MultiModelWeights:
    """A sender for each model, and the workers that commit what belongs together at once.

    All sources are read and checked before anything is sent. A worker commits between two batches,
    when it knows which versions belong together and has all of them.

    Args:
        pool: the workers.
        make_senders: `Sender` for each model, with all arguments but the model and
            ``num_workers``.
        collector: what senders are to know as their collector; weak, so that it can be forgotten.
        models: the trainer's; one that is not among them is sent when its weights are given.
        timeout: deadline of blocking calls, in seconds.
    """

    def __init__(
        self,
        pool: WorkerPool,
        make_senders: Mapping[str, Callable[..., Sender]],
        collector: weakref.ref[Any],
        models: Mapping[str, Any],
        *,
        timeout: float,
    ) -> None:
        self._pool = pool
        self._make_senders = make_senders
        self._collector = collector
        self._timeout = timeout
        self._increments = 0
        self._pending: PendingSend | None = None
        # The newest version of each model that every worker was to have; what each was sent last,
        # and which of that went to some workers only: a new one must have it too.
        self._of_all: dict[str, int] = {}
        self._last: dict[str, Any] = {}
        self._of_some: set[str] = set()
        # The weights that workers began or continue with, until something is sent to all.
        self._unsent: Weights = {}
        self.models = dict(models)
        self.senders: dict[str, Sender] = {}
        self.seconds = 0.0
        self.required: Mapping[int, int] = {}
        self.on_update: list[Callable[[Sequence[int]], None]] = []
        for name in self.models:
            self._connect(name, self.models[name])
        self._unsent = snapshots(self.senders)
        pool.on_join.append(self._join)
        pool.on_leave.append(self._leave)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models."""
        return tuple(self._make_senders)

    @property
    def version(self) -> int:
        """The newest version of the policy."""
        policy = self.senders.get(POLICY)
        return self._increments + (0 if policy is None else policy.version)

    def increment_version(self) -> None:
        """Count a version of the policy that reached the workers another way."""
        # A worker that joins meanwhile learns it once: when it joins, or with all others.
        with self._pool.lock:
            self._increments += 1
            self._pool.call_all(CollectorWorker.increment_version, 1)
            self._tell(self._pool.ids)

    def update(
        self, weights: Mapping[str, Any], worker_ids: int | Iterable[int] | None, *, blocking: bool
    ) -> SendReport | PendingSend:
        """Send the weights given, None for the trainer's own; nothing given means all models."""
        with self._pool.lock:
            started = time.perf_counter()
            self._end_last()
            ids = normalize(worker_ids, self._pool.ids)
            pending = self._send(
                weights or dict.fromkeys(self.models), ids, started, self._pool.request
            )
            try:
                self._tell(pending.worker_ids)
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
        """See `PolicyWeights.refresh`."""
        sent = self.update({}, worker_ids, blocking=False)
        return sent if isinstance(sent, PendingSend) else None

    def settle(self, pending: PendingSend) -> None:
        """See `PolicyWeights.settle`."""
        pending.wait()

    def restore(self, version: int) -> int:
        """Count on from another version, which workers are not told; by how many it is further."""
        with self._pool.lock:
            increments = version - self.version
            self._increments += increments
            return increments

    def begin_with(self, weights: Weights) -> None:
        """See `PolicyWeights.begin_with`."""
        with self._pool.lock:
            self._unsent, self._last, self._of_some = weights, {}, set()

    def let_end(self, timeout: float) -> None:
        """See `PolicyWeights.let_end`."""
        pending = self._pending
        if pending is not None:
            with suppress(SendError):
                pending.wait(timeout)

    def close(self) -> None:
        """Release what the senders hold."""
        for sender in self.senders.values():
            sender.close()

    def _end_last(self) -> None:
        """Wait for an update that was not waited for; its outcome is logged."""
        if self._pending is not None:
            with suppress(SendError):
                self._pending.wait()
            self._pending = None
        end_interrupted(self.senders.values())

    def _tell(self, worker_ids: Sequence[int]) -> None:
        for callback in self.on_update:
            callback(worker_ids)

    def _send(
        self,
        weights: Mapping[str, Any],
        ids: Sequence[int],
        started: float,
        call: Callable[..., Future[bool]],
    ) -> PendingSend:
        if not weights:
            raise ModelError(
                "there are no weights of this model; type update_policy_weights_(weights_dict="
                f"{{{self.names[0]!r}: …}})"
            )
        for name, given in weights.items():
            self._ensure_sender(name, given)
        for name, given in weights.items():
            self.senders[name].check(given)
        sends: dict[str, PendingSend] = {}
        try:
            # What belongs together is sent whole, or skipped whole.
            asked = [self.senders[name].count_push(ids) for name in weights]
            due = [i for i in ids if all(i in one for one in asked)]
            for name, given in weights.items():
                sends[name] = self.senders[name].send_counted(given, due)
            deliveries = self._announce(sends, due, call)
        except BaseException as error:
            for send in sends.values():
                send.interrupt(error)
            raise
        policy = sends.get(POLICY)
        self.required = {} if policy is None else dict.fromkeys(policy.worker_ids, policy.version)
        sent = {name: send.version for name, send in sends.items() if send.worker_ids}
        self._last |= {name: weights[name] for name in sent}
        if set(due) >= set(self._pool.ids):
            self._of_all |= sent
            self._of_some -= sent.keys()
            self._unsent = {name: w for name, w in self._unsent.items() if name not in sent}
        else:
            self._of_some |= sent.keys()
        newest = max(send.version for send in sends.values())
        return PendingSend(
            sends[POLICY].version + self._increments if POLICY in sends else newest,
            deliveries,
            [worker_id for worker_id in ids if worker_id not in deliveries],
            started=started,
            timeout=self._timeout,
            finish=partial(_finish, tuple(sends.values())),
        )

    def _announce(
        self,
        sends: Mapping[str, PendingSend],
        ids: Sequence[int],
        call: Callable[..., Future[bool]],
    ) -> dict[int, Delivery]:
        """Tell each worker which of the versions that were sent to it belong together."""
        deliveries = {}
        versions = {name: send.version for name, send in sends.items()}
        nbytes = sum(send.nbytes for send in sends.values())
        for worker_id in ids:
            delivery = Delivery(worker_id, max(versions.values()), nbytes)
            told = call(worker_id, CollectorWorker.receive_together, versions, self._timeout)
            told.add_done_callback(partial(_end, delivery))
            deliveries[worker_id] = delivery
        return deliveries

    def _ensure_sender(self, name: str, given: Any) -> None:
        if name in self.senders:
            return
        if given is None:
            raise ModelError(
                f"the collector has no weights of {name!r}; give them: "
                f"update_policy_weights_(weights_dict={{{name!r}: …}})"
            )
        self._connect(name, given)

    def _connect(self, name: str, model: Any) -> None:
        ids = self._pool.ids
        sender = self._make_senders[name](model, num_workers=max(ids) + 1)
        try:
            sender.register_collector(self._collector())
            for worker_id in set(sender.all_worker_ids()) - set(ids):
                sender.remove_worker(worker_id)
            calls = {
                i: self._pool.request(i, CollectorWorker.connect_model, name, sender.address(i))
                for i in ids
            }
            gather(calls, self._timeout, f"connect to the sender of {name!r}")
        except BaseException:
            sender.close()
            raise
        self.senders[name] = sender

    def _join(self, worker_id: int) -> None:
        """Serve a worker that is new, or that has taken the place of another."""
        with self._pool.lock:
            self._end_last()
            if self._increments:
                self._pool.call(worker_id, CollectorWorker.increment_version, self._increments)
            for name, sender in self.senders.items():
                if worker_id in sender.all_worker_ids():
                    sender.remove_worker(worker_id)
                sender.add_worker(worker_id)
                address = sender.address(worker_id)
                call = self._pool.call(worker_id, CollectorWorker.connect_model, name, address)
                gather({worker_id: call}, self._timeout, f"connect to the sender of {name!r}")
            newest = self._pool.call(
                worker_id, CollectorWorker.receive_together, self._of_all, self._timeout
            )
            (received,) = gather({worker_id: newest}, self._timeout, "commit the newest weights")
            begun = self._pool.call(
                worker_id, CollectorWorker.begin_with, self._unsent, self.version
            )
            gather({worker_id: begun}, self._timeout, "load the weights to begin with")
            if self._of_some or not received:
                self._send_anew(worker_id)

    def _send_anew(self, worker_id: int) -> None:
        """Send a worker what was sent last of all models: not all of it went to all, or as one."""
        pending = self._send(self._last, (worker_id,), time.perf_counter(), self._pool.call)
        try:
            pending.wait()
        except BaseException as error:
            pending.interrupt(error)
            raise

    def _leave(self, worker_id: int) -> None:
        """Serve a worker no longer."""
        with self._pool.lock:
            self._end_last()
            for sender in self.senders.values():
                # One that could not join may not be there.
                if worker_id in sender.all_worker_ids():
                    sender.remove_worker(worker_id)


def _end(delivery: Delivery, call: Future[bool]) -> None:
    error = call.exception()
    if isinstance(error, WorkerError):
        delivery.fail(error)
    elif error is not None:
        delivery.fail(WorkerError(delivery.worker_id, str(error)))
    elif call.result():
        delivery.acknowledge()
    else:
        delivery.fail(
            WorkerTimeoutError(delivery.worker_id, "was late: a newer update has come meanwhile")
        )


def _finish(sends: Sequence[PendingSend], report: SendReport, *, waited: bool) -> SendReport:
    try:
        for send in sends if waited else ():
            with suppress(SendError):
                send.wait(_AFTERWARDS)
    finally:
        for send in sends:
            send.abandon()
    return report


def make_weights(
    pool: WorkerPool,
    requests: Requests,
    schemes: Mapping[str, ModelScheme],
    *,
    collector: weakref.ref[Any],
    policy: Any,
    models: Mapping[str, Any],
    made_by_workers: bool,
    timeout: float,
) -> PolicyWeights | MultiModelWeights:
    """Return the object that sends weights to the workers of a collector.

    Args:
        pool: the workers.
        requests: the batches that they are asked for.
        schemes: the scheme of each model.
        collector: what senders are to know as their collector.
        policy: the trainer's policy, if there is one.
        models: what the trainer has beside it.
        made_by_workers: whether workers have policies that the trainer has not seen.
        timeout: deadline of blocking calls, in seconds.
    """
    make_senders = {
        name: partial(Sender, chosen.scheme, model_id=name, timeout=timeout, **chosen.arguments)
        for name, chosen in schemes.items()
    }
    if list(schemes) == [POLICY]:
        return PolicyWeights(
            pool,
            requests.busy,
            make_senders[POLICY],
            collector,
            policy,
            shared=shares_policy(schemes[POLICY].scheme),
            made_by_workers=made_by_workers,
            timeout=timeout,
        )
    known = dict(models)
    module = module_of(policy) if POLICY in schemes else None
    if module is not None:
        known[POLICY] = module
    return MultiModelWeights(pool, make_senders, collector, known, timeout=timeout)
