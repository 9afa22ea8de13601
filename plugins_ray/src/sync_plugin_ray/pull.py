"""Sends versions to receivers that connect by addresses: each asks a mailbox, or is called."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, PendingCallsLimitExceeded, RayActorError

from sync_core import (
    Delivery,
    Payload,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_core.transports import Notice
from sync_plugin_ray import liveness
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.inbox import hand
from sync_plugin_ray.mailbox import Event, Mailbox, MailboxEndpoint, MailboxOffer
from sync_plugin_ray.store import ObjectStore, Publication

_log = logging.getLogger("sync_core")
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
# How long a call waits in the actor for the receiver to answer, in seconds. A later answer comes by
# the mailbox, and the thread of the actor is free for other receivers.
_WAITING = 0.25
# Calls of one worker at a time: one that waits for an answer, and one that brings a newer version.
_CALLS = 2
_REMOVED = "was removed from the sender"


@dataclass(eq=False)
class _Worker:
    """One worker.

    Args:
        wanted: the newest version meant for it.
        delivery: the delivery of that version.
        since: when it was last known to do something, while it is waited for.
        reader: the secret name of its receiver; empty before one has come.
        actor: the actor that this runs in, if it runs in one.
        group: the concurrency group in which that is called; empty for a receiver that asks.
        pid: its process.
        probed: whether the actor was asked if it lives.
        committed: the version that its receiver has committed last.
        calls: the calls under way.
        handed: the version that was brought to it last.
        left: why its receiver has left; empty while there is one.
    """

    wanted: Publication | None = None
    delivery: Delivery | None = None
    since: float = 0.0
    reader: str = field(default="", repr=False)
    actor: Any = None
    group: str = ""
    pid: int = 0
    probed: bool = False
    committed: int = 0
    calls: list[Any] = field(default_factory=list)
    handed: Publication | None = None
    left: str = ""

    def joined(self, event: Event) -> None:
        """A receiver has come in its place."""
        self.reader, self.actor, self.group = event.reader, event.actor, event.group
        self.pid, self.probed, self.committed = event.pid, False, 0
        self.calls, self.handed, self.left = [], None, ""

    @property
    def is_behind(self) -> bool:
        """Return whether it may not have committed the newest version meant for it."""
        return self.wanted is not None and self.committed < self.wanted.version

    def lost(self, worker_id: int, error: BaseException | None) -> WorkerLostError | None:
        """Return the message for a call that failed because its actor is dead; None for others.

        One that Ray restarts is not gone; whether it will receive, the deadline tells.
        """
        if not isinstance(error, RayActorError) or isinstance(error, ActorUnavailableError):
            return None
        reason = str(error).strip().splitlines()[0]
        message = f"its actor, which was process {self.pid}, is gone: {reason}"
        return WorkerLostError(worker_id, message)


class PullSender(SenderTransport):
    """Sends each version to receivers that are called, and offers it to the others in a mailbox.

    A receiver is called if it runs in an actor that has said `take_calls`.

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
        self._workers = {worker_id: _Worker() for worker_id in context.worker_ids}
        self._newest_for_all: Publication | None = None
        self._recent: deque[Publication] = deque()
        self._updates = 0
        self._timeout = context.timeout
        self._notify = context.notify
        self._token_of = context.worker_token
        tokens = {worker_id: self._token_of(worker_id) for worker_id in context.worker_ids}
        self._mailbox: Any = liveness.start(Mailbox, tokens, self._offers())
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listen()
        self._thread = threading.Thread(target=self._serve, name="sync-ray-mailbox", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> MailboxEndpoint:
        """The mailbox, the same for every worker."""
        del worker_id
        return MailboxEndpoint(self._mailbox)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Put the payload once, make the calls, and let the mailbox offer it."""
        self._cluster.check()
        publication = self._store.put(payload)
        deliveries = {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}
        with self._lock:
            for worker_id, delivery in deliveries.items():
                # Another thread may have removed it meanwhile.
                worker = self._workers.get(worker_id)
                if worker is None:
                    delivery.fail(WorkerError(worker_id, _REMOVED))
                    continue
                worker.delivery, worker.since = delivery, time.monotonic()
                if lost := self._lost or worker.left:
                    delivery.fail(WorkerLostError(worker_id, lost))
            calls = self._want(publication, worker_ids)
        _wait_for(calls)
        # The thread may be waiting for events only; now there is a worker that may die.
        self._events.put(_nothing)
        return deliveries

    def publish(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """Send a version that was put already, without waiting for answers."""
        with self._lock:
            calls = self._want(publication, worker_ids)
        _wait_for(calls)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        del worker
        self._cluster.check()
        with self._lock:
            self._workers[worker_id] = _Worker(wanted=self._newest_for_all)
            informing = self._update_mailbox({worker_id: self._token_of(worker_id)})
        # Its receiver must find the mailbox informed.
        ray.get(informing, timeout=self._timeout)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, and let it know."""
        with self._lock:
            worker = self._workers.pop(worker_id)
            if self._cluster.connected:
                self._update_mailbox()
        if worker.delivery is not None:
            worker.delivery.fail(WorkerError(worker_id, _REMOVED))

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

    def _want(self, publication: Publication, worker_ids: Sequence[int]) -> list[Any]:
        """Send a version, with the lock held; return calls to wait for.

        They bring it to the mailbox, and to receivers that may find an older version before.
        """
        workers = {i: self._workers[i] for i in worker_ids if i in self._workers}
        calls = []
        for worker_id, worker in workers.items():
            behind = worker.is_behind
            worker.wanted = publication
            call = self._hand(worker_id, worker, 0.0 if behind else _WAITING)
            if behind and call is not None:
                calls.append(call)
        if len(workers) == len(self._workers):
            self._newest_for_all = publication
        self._recent.append(publication)
        while len(self._recent) > min(_RECENT, _RECENT_BYTES // publication.nbytes):
            self._recent.popleft()
        if not all(worker.group for worker in workers.values()):
            calls.append(self._update_mailbox())
        return calls

    def _update_mailbox(self, tokens: Mapping[int, str] | None = None) -> Any:
        """Let the mailbox know, with the lock held, of what is offered; the call."""
        self._updates += 1
        offers = self._offers()
        met = {worker_id: worker.reader for worker_id, worker in self._workers.items()}
        return self._mailbox.update.remote(self._updates, offers, met, tokens)

    def _offers(self) -> dict[int, MailboxOffer | None]:
        return {
            worker_id: None if worker.wanted is None or worker.group else _offer(worker.wanted)
            for worker_id, worker in self._workers.items()
        }

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
            try:
                handle()
            except Exception:
                # The thread lives for the other workers.
                _log.exception("an event of the mailbox could not be handled")
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
            with self._lock:
                self._update_mailbox()
        self._listen()

    def _handle(self, event: Event) -> None:
        with self._lock:
            worker = self._workers.get(event.worker_id)
            if worker is None:
                return
            if event.kind == "joined":
                worker.joined(event)
                self._watch(event)
                self._hand(event.worker_id, worker, _WAITING)
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
                self._put_again(event, worker, publication)
        elif event.kind == "answered" and delivery is not None:
            delivery.settle(event.answer)
        elif event.kind == "answered" and event.answer and event.answer.get("error") is None:
            self._notify(event.worker_id, Notice("acknowledged", event.version))

    def _watch(self, event: Event) -> None:
        """Note the end of the process of a receiver that has joined."""
        worker_id, reader = event.worker_id, event.reader
        liveness.on_end(
            event.token, lambda: self._events.put(lambda: self._ended(worker_id, reader))
        )

    def _ended(self, worker_id: int, reader: str) -> None:
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None or worker.reader != reader or worker.left:
                return
            reason = f"its process {worker.pid} has ended"
            self._notify(worker_id, Notice("lost", reason=reason))
            # Another receiver may come where Ray restarts the actor, which a probe tells.
            if worker.actor is None:
                worker.left = reason
                if worker.delivery is not None:
                    worker.delivery.fail(WorkerLostError(worker_id, reason))

    def _left(self, worker: _Worker, event: Event) -> None:
        """Fail what the worker has not answered; its receiver was closed."""
        delivery = worker.delivery
        if delivery is not None and event.answer is not None:
            delivery.settle(event.answer)
        worker.left = f"{event.reason} (process {worker.pid})"
        self._notify(event.worker_id, Notice("lost", reason=worker.left))
        if delivery is not None:
            delivery.fail(WorkerLostError(event.worker_id, worker.left))

    def _hand(self, worker_id: int, worker: _Worker, patience: float) -> Any | None:
        """Call a worker with its newest version, with the lock held.

        Args:
            worker_id: its id.
            worker: the worker.
            patience: how long the call waits for the answer, in seconds.

        Returns:
            The call; None for a worker that asks, has it, or has two calls under way, the first
            of which to return makes this one.
        """
        publication, reader = worker.wanted, worker.reader
        if not worker.group or publication is None or self._lost is not None:
            return None
        if worker.handed is publication:
            return None
        if len(worker.calls) == _CALLS:
            # One may have returned, and its event not be handled yet.
            _, worker.calls = ray.wait(worker.calls, num_returns=_CALLS, timeout=0)
        if len(worker.calls) == _CALLS:
            return None
        call: Any = worker.actor.__ray_call__.options(concurrency_group=worker.group)
        try:
            # One argument instead of three: to serialise each separately takes longer.
            made = call.remote(partial(hand, reader, _offer(publication), patience))
        except PendingCallsLimitExceeded:
            if worker.delivery is not None:
                refused = "its actor takes no more calls; give it more max_pending_calls"
                worker.delivery.fail(WorkerError(worker_id, refused))
            return None
        worker.calls, worker.handed = [*worker.calls, made], publication

        def returned(answer: Future[Any]) -> None:
            # No receiver of a removed worker reads the event, which would hold the version.
            if self._workers.get(worker_id) is worker:
                self._events.put(lambda: self._handed(worker_id, reader, publication, made, answer))

        made.future().add_done_callback(returned)
        return made

    def _handed(
        self,
        worker_id: int,
        reader: str,
        publication: Publication,
        call: Any,
        returned: Future[Any],
    ) -> None:
        error = returned.exception()
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None or worker.reader != reader:
                return
            worker.calls = [other for other in worker.calls if other != call]
            failure: WorkerError | None = worker.lost(worker_id, error)
            if failure is None and error is not None and worker.handed is publication:
                if isinstance(error, ActorUnavailableError):
                    # Ray holds the next call back until the actor is there again.
                    worker.handed = None
                else:
                    failure = WorkerError(worker_id, f"could not run the call: {error}")
            if failure is None:
                self._hand(worker_id, worker, _WAITING)
        if failure is not None and worker.delivery is not None:
            worker.delivery.fail(failure)
        elif error is None and (answer := returned.result()) is not None:
            self._handle(Event("answered", worker_id, publication.version, answer))

    def _put_again(self, event: Event, worker: _Worker, publication: Publication) -> None:
        try:
            reason = None if publication.put_again(event.data) else "too often"
        except Exception as error:
            reason = str(error) or repr(error)
        if reason is None:
            with self._lock:
                worker.handed = None
                self._hand(event.worker_id, worker, _WAITING)
                self._update_mailbox()
        elif worker.delivery is not None:
            message = f"the object with version {event.version} was lost: {reason}"
            worker.delivery.fail(WorkerError(event.worker_id, message))

    def _silent(self) -> list[tuple[int, _Worker]]:
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
            except PendingCallsLimitExceeded:
                continue  # it takes no more calls now; later, perhaps
            worker.probed = True
            probe.future().add_done_callback(
                lambda future, i=worker_id, w=worker, a=worker.actor: self._events.put(
                    lambda: self._probed(i, w, a, future)
                )
            )

    def _probed(self, worker_id: int, worker: _Worker, actor: Any, future: Future[Any]) -> None:
        if worker.actor is not actor:
            return
        worker.probed = False
        worker.since = time.monotonic()
        lost = worker.lost(worker_id, future.exception())
        if lost is not None and worker.delivery is not None:
            worker.delivery.fail(lost)


def _offer(publication: Publication) -> MailboxOffer:
    return MailboxOffer(publication.version, publication.digest, publication.data)


def _wait_for(calls: list[Any]) -> None:
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=_INFORMING)


def _nothing() -> None:
    return
