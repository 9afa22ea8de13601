"""Sends versions to receivers that connect by addresses: by a mailbox, or by calls."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sync_core import (
    CapacityError,
    Delivery,
    Payload,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_core.transports import Notice
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.mailbox import Event, Mailbox, MailboxEndpoint, MailboxOffer
from sync_plugin_ray.pull_worker import PullWorker
from sync_plugin_ray.store import ObjectStore, Publication

# A worker that has not answered for so long is asked whether it still lives.
_PATIENCE = 0.5
# Of an object that its owner releases before its borrowers, Ray keeps 0.3 KB in the
# owner for ever (docs/benchmarks/ray_growth.py). So small versions stay with the sender for so many
# more, and so many bytes.
_RECENT = 16
_RECENT_BYTES = 1 << 23
# A worker that asks after a send has returned gets its version, so the mailbox has it. One that is
# silent for that many seconds keeps no send: its workers are late then, as the deadline finds.
_INFORMING = 1.0
# How long closing waits for the thread that does it, in seconds.
_CLOSING = 5.0


class PullSender(SenderTransport):
    """Publishes versions in a mailbox, and reads from there which workers have committed them.

    Actors that may be called at any time are brought them by calls, and asked for nothing.

    Args:
        context: what the sender gave to `create_transport`.
        cluster: left at the end, unless ``owns_cluster`` is False.
        store: where versions are put.
        owns_cluster: False where another transport leaves the cluster.
    """

    def __init__(
        self,
        context: TransportContext,
        cluster: Cluster,
        store: ObjectStore,
        *,
        owns_cluster: bool = True,
    ) -> None:
        self._cluster = cluster
        self._owns_cluster = owns_cluster
        self._store = store
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._workers = {worker_id: PullWorker() for worker_id in context.worker_ids}
        self._newest_for_all: Publication | None = None
        self._recent: deque[Publication] = deque()
        self._updates = 0
        self._timeout = context.timeout
        self._notify = context.notify
        # On this node, so that it lives as long as the sender does.
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox: Any = (
            ray.remote(Mailbox)
            .options(num_cpus=0, scheduling_strategy=node, max_concurrency=10_000)
            .remote(context.token, self._offers())
        )
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listen()
        self._thread = threading.Thread(target=self._serve, name="sync-ray-mailbox", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> MailboxEndpoint:
        """The mailbox, the same for every worker."""
        del worker_id
        return MailboxEndpoint(self._mailbox)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Put the payload once, and let the mailbox offer it."""
        self._cluster.check()
        publication = self._store.put(payload)
        deliveries = {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}
        with self._lock:
            there = [worker_id for worker_id in worker_ids if worker_id in self._workers]
            for worker_id, delivery in deliveries.items():
                worker = self._workers.get(worker_id)
                if worker is None:
                    delivery.fail(WorkerError(worker_id, "was removed from the sender"))
                    continue
                worker.delivery, worker.since = delivery, time.monotonic()
                if lost := self._lost or worker.left:
                    delivery.fail(WorkerLostError(worker_id, lost))
            rest = [each for each in there if not self._hand(each, publication)]
            self._want(publication, there)
            taken_back = [self._workers[each].take_back(publication.version) for each in rest]
        # The version that the mailbox refers to stays in the store: it should be the newest.
        if rest or not publication.travels_in_calls:
            self._inform(taken_back)
        # The thread may be waiting for events only; now there is a worker that may die.
        self._events.put(_nothing)
        return deliveries

    def publish(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """MailboxOffer a version that was put already, without waiting for answers."""
        with self._lock:
            self._want(publication, worker_ids)
        self._inform()

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        del worker
        self._cluster.check()
        with self._lock:
            self._workers[worker_id] = PullWorker(wanted=self._newest_for_all)
        # Its receiver must find the mailbox informed.
        ray.get(self._update_mailbox(), timeout=self._timeout)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, and let it know."""
        with self._lock:
            worker = self._workers.pop(worker_id, None)
        if worker is not None and worker.delivery is not None:
            worker.delivery.fail(WorkerError(worker_id, "was removed from the sender"))
        if self._cluster.connected:
            self._update_mailbox()

    def close(self) -> None:
        """Let the receivers know, and end the mailbox."""
        # See PushSender.close.
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING)

    def _end(self) -> None:
        connected = self._cluster.connected
        reason = "the sender was closed" if connected else "Ray was shut down"
        with self._lock:
            workers = dict(self._workers)
        for worker_id, worker in workers.items():
            if worker.delivery is not None:
                worker.delivery.fail(WorkerError(worker_id, reason))
        if connected:
            with self._lock:
                self._workers.clear()
                self._newest_for_all = None
                self._recent.clear()
            # Receivers that ask from now on find the actor dead, which says the same.
            ray.wait([self._mailbox.close.remote()], timeout=2)
            ray.kill(self._mailbox)
        if self._owns_cluster:
            self._cluster.leave()

    def _want(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        for worker_id in worker_ids:
            if worker_id in self._workers:
                self._workers[worker_id].wanted = publication
        if {*worker_ids} >= self._workers.keys():
            self._newest_for_all = publication
        self._recent.append(publication)
        while len(self._recent) > min(_RECENT, _RECENT_BYTES // publication.nbytes):
            self._recent.popleft()

    def _inform(self, others: Sequence[Any] = ()) -> None:
        calls = [self._update_mailbox(), *(each for each in others if each is not None)]
        ray.wait(calls, num_returns=len(calls), timeout=_INFORMING)

    def _offers(self) -> dict[int, MailboxOffer | None]:
        return {worker_id: worker.offer for worker_id, worker in self._workers.items()}

    def _update_mailbox(self) -> Any:
        with self._lock:
            self._updates += 1
            number, offers = self._updates, self._offers()
            met = {worker_id: worker.reader for worker_id, worker in self._workers.items()}
        return self._mailbox.update.remote(number, offers, met)

    def _listen(self) -> None:
        call = self._mailbox.events.remote()
        # The callback runs in a thread of Ray's, where no new call may be made.
        call.future().add_done_callback(
            lambda future: self._events.put(lambda: self._heard(future))
        )

    def _serve(self) -> None:
        while (handle := self._next_event()) is not None:
            if not self._cluster.connected:
                # A call would start another Ray; and the process is ended where a thread lets go
                # of a reference while another one shuts Ray down, so whatever holds any is kept.
                self._events.put(handle)
                break
            handle()
            del handle
        self._end()

    def _next_event(self) -> Callable[[], None] | None:
        try:
            return self._events.get(timeout=self._next_probe())
        except queue.Empty:
            return self._probe_silent_workers

    def _heard(self, future: Future[list[Event]]) -> None:
        try:
            events = future.result()
        except Exception as error:
            with self._lock:
                reason = str(error).strip().splitlines()[0]
                self._lost = f"the mailbox of its sender is gone ({reason}); make a new Sender"
                for worker_id, worker in self._workers.items():
                    self._notify(worker_id, Notice("lost", reason=self._lost))
                    if worker.delivery is not None:
                        worker.delivery.fail(WorkerLostError(worker_id, self._lost))
            return
        for event in events:
            self._handle(event)
        if any(event.kind == "joined" for event in events):
            self._update_mailbox()
        self._listen()

    def _handle(self, event: Event) -> None:
        with self._lock:
            worker = self._workers.get(event.worker_id)
            if worker is None:
                return
            if event.kind == "joined":
                worker.joined(event)
                self._notify(event.worker_id, Notice("connected"))
            delivery = worker.delivery
            publication = worker.wanted
            if event.kind == "left":
                self._left(worker, event)
                return
            if event.kind == "answered" and event.answer and event.answer.get("error") is None:
                worker.committed = max(worker.committed, event.version)
        if event.kind == "lost" and publication is not None:
            if publication.version == event.version:
                # A call brought what is lost, and the mailbox offers what is put now.
                worker.handed = None
                self._put_again(event, publication, delivery)
        elif event.kind == "answered" and delivery is not None:
            delivery.settle(event.answer)
        elif event.kind == "answered" and event.answer and event.answer.get("error") is None:
            self._notify(event.worker_id, Notice("acknowledged", event.version))

    def _left(self, worker: PullWorker, event: Event) -> None:
        """Fail what the worker has not answered; its receiver was closed."""
        delivery = worker.delivery
        if delivery is not None and event.answer is not None:
            delivery.settle(event.answer)
        worker.left = f"{event.reason} (process {worker.pid})"
        self._notify(event.worker_id, Notice("lost", reason=worker.left))
        if delivery is not None:
            delivery.fail(WorkerLostError(event.worker_id, worker.left))

    def _hand(self, worker_id: int, publication: Publication) -> bool:
        """Let a call bring a version to a worker; False where the mailbox has to offer it."""
        worker = self._workers[worker_id]
        call = worker.hand(publication) if self._lost is None else None
        if call is None:
            return False
        reader = worker.reader

        def returned(call: Future[Any]) -> None:
            # No receiver of a removed worker reads the event, which would hold the version.
            if self._workers.get(worker_id) is worker:
                self._events.put(lambda: self._handed(worker_id, reader, publication, call))

        call.add_done_callback(returned)
        return True

    def _handed(
        self, worker_id: int, reader: str, publication: Publication, call: Future[Any]
    ) -> None:
        error = call.exception()
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None:
                return
            worker.called = False
            if worker.reader != reader:
                return  # the mailbox offers it to the one that has come since
            answer = None if error is not None else call.result()
            offers = answer is None and worker.handed is publication
            if offers:
                worker.handed = None
        if answer is not None:
            self._handle(Event("answered", worker_id, publication.version, answer))
        elif (lost := worker.lost(worker_id, error)) is not None:
            if worker.delivery is not None:
                worker.delivery.fail(lost)
        elif offers:
            self._update_mailbox()

    def _put_again(self, event: Event, publication: Publication, delivery: Delivery | None) -> None:
        try:
            reason = None if publication.put_again(event.data) else "too often"
        except CapacityError as error:
            reason = str(error)
        if reason is None:
            self._update_mailbox()
        elif delivery is not None:
            message = f"the object with version {event.version} was lost: {reason}"
            delivery.fail(WorkerError(event.worker_id, message))

    def _silent(self) -> list[tuple[int, PullWorker]]:
        with self._lock:
            return [
                (worker_id, worker)
                for worker_id, worker in self._workers.items()
                if worker.actor is not None
                and not worker.probed
                and worker.delivery is not None
                and not worker.delivery.wait(0)
            ]

    def _next_probe(self) -> float | None:
        waits = [worker.since + _PATIENCE - time.monotonic() for _, worker in self._silent()]
        return max(0.0, min(waits)) if waits else None

    def _probe_silent_workers(self) -> None:
        # The call waits until the actor has time for it, or fails at once when there is none.
        for worker_id, worker in self._silent():
            if time.monotonic() < worker.since + _PATIENCE:
                continue
            worker.since = time.monotonic()
            try:
                probe = worker.actor.__ray_ready__.remote()
            except ray.exceptions.PendingCallsLimitExceeded:
                continue  # it takes no more calls now; later, perhaps
            worker.probed = True
            probe.future().add_done_callback(
                lambda future, i=worker_id, w=worker, a=worker.actor: self._events.put(
                    lambda: self._probed(i, w, a, future)
                )
            )

    def _probed(self, worker_id: int, worker: PullWorker, actor: Any, future: Future[Any]) -> None:
        if worker.actor is not actor:
            return
        worker.probed = False
        worker.since = time.monotonic()
        lost = worker.lost(worker_id, future.exception())
        if lost is not None and worker.delivery is not None:
            worker.delivery.fail(lost)


def _nothing() -> None:
    return
