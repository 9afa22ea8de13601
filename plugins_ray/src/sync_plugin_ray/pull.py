"""Sends versions to receivers that connect by addresses: each asks a mailbox, or is called."""

from __future__ import annotations

import logging
import queue
import threading
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
from sync_core.transports import Notice, Publication, Roster
from sync_plugin_ray import liveness
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.inbox import hand
from sync_plugin_ray.mailbox import Event, Mailbox, MailboxEndpoint, MailboxOffer
from sync_plugin_ray.store import ObjectStore, StoredVersion

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


@dataclass(eq=False)
class _Receiver:
    """The receiver that has a worker's place.

    Args:
        name: its secret name.
        pid: its process.
        actor: the actor that this runs in, if it runs in one.
        group: the concurrency group in which that is called; empty for a receiver that asks.
        probed: whether the actor was asked if it lives.
        answered: the newest version about which it has answered.
        calls: the calls under way.
        handed: the version that was brought to it last.
    """

    name: str = field(repr=False)
    pid: int
    actor: Any
    group: str
    probed: bool = False
    answered: int = 0
    calls: list[Any] = field(default_factory=list)
    handed: Publication | None = None


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
        self.roster = Roster(context.worker_ids, context.notify)
        # By worker; one that is known to be gone is left out.
        self._receivers: dict[int, _Receiver] = {}
        self._recent: deque[StoredVersion] = deque()
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

    def publish(self, payload: Payload) -> Publication:
        """Put the payload once."""
        self._cluster.check()
        stored = self._store.put(payload)
        return Publication(stored.version, stored.nbytes, stored)

    def repeat(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """Send what another transport has published, and wait for no delivery."""
        for delivery in self.roster.publish(publication, worker_ids).values():
            delivery.watch(self._committed)
        self.offer(publication, worker_ids)

    def _committed(self, delivery: Delivery, error: WorkerError | None) -> None:
        if error is None:
            self._notify(delivery.worker_id, Notice("acknowledged", delivery.version))

    def offer(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """Make the calls, and let the mailbox offer the version."""
        stored: StoredVersion = publication.content
        calls = []
        with self._lock:
            receivers = {i: self._receivers[i] for i in worker_ids if i in self._receivers}
            for worker_id, receiver in receivers.items():
                # It may find an older version before.
                handed = receiver.handed
                behind = handed is not None and handed.version > receiver.answered
                call = self._hand(worker_id, receiver, 0.0 if behind else _WAITING)
                if call is not None and behind:
                    calls.append(call)
            self._recent.append(stored)
            while len(self._recent) > min(_RECENT, _RECENT_BYTES // stored.nbytes):
                self._recent.popleft()
            if not all(i in receivers and receivers[i].group for i in worker_ids):
                calls.append(self._update_mailbox())
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_INFORMING)
        # The thread may be waiting for events only; now there is a worker that may die.
        self._events.put(_nothing)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        del worker
        self._cluster.check()
        with self._lock:
            self.roster.add(worker_id)
            informing = self._update_mailbox({worker_id: self._token_of(worker_id)})
        # Its receiver must find the mailbox informed.
        ray.get(informing, timeout=self._timeout)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, and let it know."""
        with self._lock:
            self.roster.remove(worker_id)
            self._receivers.pop(worker_id, None)
            if self._cluster.connected:
                self._update_mailbox()

    def close(self) -> None:
        """Let the receivers know, and end the mailbox."""
        # See PushSender.close.
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING)

    def _end(self) -> None:
        if self._cluster.connected:
            with self._lock:
                self.roster.close()
                self._receivers.clear()
                self._recent.clear()
            # Receivers that ask from now on find the actor dead, which says the same.
            ray.wait([self._mailbox.close.remote()], timeout=2)
            ray.kill(self._mailbox)
        else:
            self._lose_all("Ray was shut down")
        if self._owns_cluster:
            self._cluster.leave()

    def _update_mailbox(self, tokens: Mapping[int, str] | None = None) -> Any:
        """Let the mailbox know, with the lock held, of what is offered; the call."""
        self._updates += 1
        met = {worker_id: receiver.name for worker_id, receiver in self._receivers.items()}
        return self._mailbox.update.remote(self._updates, self._offers(), met, tokens)

    def _offers(self) -> dict[int, MailboxOffer | None]:
        offers: dict[int, MailboxOffer | None] = dict.fromkeys(self.roster.worker_ids)
        for worker_id in offers:
            receiver, wanted = self._receivers.get(worker_id), self.roster.wanted(worker_id)
            if wanted is not None and not (receiver and receiver.group):
                offers[worker_id] = _offer(wanted)
        return offers

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
            return self._events.get(timeout=_PATIENCE if self._silent() else None)
        except queue.Empty:
            return self._probe_silent_actors

    def _heard(self, future: Future[list[Event]]) -> None:
        try:
            events = future.result()
        except Exception as error:
            reason = _first_line(error)
            self._lose_all(f"the mailbox of its sender is gone ({reason}); make a new Sender")
            with self._lock:
                self._receivers.clear()
            return
        for event in events:
            self._handle(event)
        if any(event.kind == "joined" for event in events):
            with self._lock:
                self._update_mailbox()
        self._listen()

    def _handle(self, event: Event) -> None:
        worker_id = event.worker_id
        if event.kind == "joined":
            self._join(event)
            return
        with self._lock:
            receiver = self._receivers.get(worker_id)
            if receiver is None or receiver.name != event.reader:
                return
            if event.answer is not None:
                self._answered(worker_id, receiver, event.version, event.answer)
            if event.kind == "left":
                self._lost(worker_id, receiver, f"{event.reason} (process {receiver.pid})")
        if event.kind == "lost":
            self._put_again(worker_id, receiver, event)

    def _join(self, event: Event) -> None:
        """Let a receiver take its worker's place, bring it the newest version, and watch it."""
        worker_id = event.worker_id
        receiver = _Receiver(event.reader, event.pid, event.actor, event.group)
        with self._lock:
            if not self.roster.connected(worker_id, receiver.name):
                return
            self._receivers[worker_id] = receiver
            self._hand(worker_id, receiver, _WAITING)
        liveness.on_end(
            event.token, lambda: self._events.put(lambda: self._ended(worker_id, receiver))
        )

    def _ended(self, worker_id: int, receiver: _Receiver) -> None:
        """Note the end of a receiver's process."""
        reason = f"its process {receiver.pid} has ended"
        with self._lock:
            if self._receivers.get(worker_id) is not receiver:
                return
            if receiver.actor is None:
                self._lost(worker_id, receiver, reason)
            else:
                # Another receiver may come where Ray restarts the actor, which a probe tells.
                lost = WorkerLostError(worker_id, reason)
                self.roster.failed(worker_id, receiver.name, 0, lost)

    def _lost(self, worker_id: int, receiver: _Receiver, reason: str) -> None:
        """Forget a receiver that is gone, with the lock held."""
        self.roster.lost(worker_id, receiver.name, reason)
        if self._receivers.get(worker_id) is receiver:
            del self._receivers[worker_id]

    def _lose_all(self, reason: str) -> None:
        """Report every worker as lost, also one that has not connected."""
        with self._lock:
            for worker_id in self.roster.worker_ids:
                receiver = self._receivers.get(worker_id)
                self.roster.lost(worker_id, None if receiver is None else receiver.name, reason)

    def _died(self, worker_id: int, receiver: _Receiver, error: BaseException | None) -> bool:
        """Return whether a call failed because its actor is dead, which the worker is then, too.

        An actor that Ray restarts is not dead; whether it will receive, the deadline tells.
        """
        if not isinstance(error, RayActorError) or isinstance(error, ActorUnavailableError):
            return False
        reason = f"its actor, which was process {receiver.pid}, is gone: {_first_line(error)}"
        self._lost(worker_id, receiver, reason)
        return True

    def _answered(
        self, worker_id: int, receiver: _Receiver, version: int, answer: Mapping[str, Any]
    ) -> None:
        receiver.answered = max(receiver.answered, version)
        self.roster.answered(worker_id, receiver.name, answer)

    def _hand(self, worker_id: int, receiver: _Receiver, patience: float) -> Any | None:
        """Call a receiver with the newest version for its worker, with the lock held.

        Args:
            worker_id: the worker.
            receiver: its receiver.
            patience: how long the call waits for the answer, in seconds.

        Returns:
            The call; None for a receiver that asks, has it, or has two calls under way, the first
            of which to return makes this one.
        """
        publication = self.roster.wanted(worker_id)
        if not receiver.group or publication is None or receiver.handed is publication:
            return None
        if len(receiver.calls) == _CALLS:
            # One may have returned, and its event not be handled yet.
            _, receiver.calls = ray.wait(receiver.calls, num_returns=_CALLS, timeout=0)
        if len(receiver.calls) == _CALLS:
            return None
        call: Any = receiver.actor.__ray_call__.options(concurrency_group=receiver.group)
        try:
            # One argument instead of three: to serialise each separately takes longer.
            made = call.remote(partial(hand, receiver.name, _offer(publication), patience))
        except PendingCallsLimitExceeded:
            refused = "its actor takes no more calls; give it more max_pending_calls"
            self._failed(worker_id, receiver, publication, refused)
            return None
        receiver.calls, receiver.handed = [*receiver.calls, made], publication

        def returned(answer: Future[Any]) -> None:
            # No receiver of a removed worker reads the event, which would hold the version.
            if self._receivers.get(worker_id) is receiver:
                self._events.put(
                    lambda: self._handed(worker_id, receiver, publication, made, answer)
                )

        made.future().add_done_callback(returned)
        return made

    def _handed(
        self,
        worker_id: int,
        receiver: _Receiver,
        publication: Publication,
        call: Any,
        returned: Future[Any],
    ) -> None:
        error = returned.exception()
        with self._lock:
            if self._receivers.get(worker_id) is not receiver:
                return
            receiver.calls = [other for other in receiver.calls if other != call]
            if self._died(worker_id, receiver, error):
                return
            if isinstance(error, ActorUnavailableError) and receiver.handed is publication:
                # Ray holds the next call back until the actor is there again.
                receiver.handed = None
            elif error is not None:
                self._failed(worker_id, receiver, publication, f"could not run the call: {error}")
            elif (answer := returned.result()) is not None:
                self._answered(worker_id, receiver, publication.version, answer)
            self._hand(worker_id, receiver, _WAITING)

    def _failed(
        self, worker_id: int, receiver: _Receiver, publication: Publication, reason: str
    ) -> None:
        error = WorkerError(worker_id, reason)
        self.roster.failed(worker_id, receiver.name, publication.version, error)

    def _put_again(self, worker_id: int, receiver: _Receiver, event: Event) -> None:
        publication = self.roster.wanted(worker_id)
        if publication is None or publication.version != event.version:
            return
        try:
            reason = None if publication.content.put_again(event.data) else "too often"
        except Exception as error:
            reason = str(error) or repr(error)
        with self._lock:
            if reason is None:
                receiver.handed = None
                self._hand(worker_id, receiver, _WAITING)
                self._update_mailbox()
            else:
                lost = f"the object with version {event.version} was lost: {reason}"
                self._failed(worker_id, receiver, publication, lost)

    def _silent(self) -> dict[int, _Receiver]:
        """Return the receivers in actors that have not answered, and are not being probed."""
        with self._lock:
            return {
                worker_id: receiver
                for worker_id, receiver in self._receivers.items()
                if receiver.actor is not None
                and not receiver.probed
                and self._owes(worker_id, receiver)
            }

    def _owes(self, worker_id: int, receiver: _Receiver) -> bool:
        """Return whether a receiver has not answered about the newest version for its worker."""
        return self.roster.wanted(worker_id, after=receiver.answered) is not None

    def _probe_silent_actors(self) -> None:
        # The call waits until the actor has time for it, or fails at once when there is none.
        for worker_id, receiver in self._silent().items():
            try:
                probe = receiver.actor.__ray_ready__.remote()
            except PendingCallsLimitExceeded:
                continue  # it takes no more calls now; later, perhaps
            receiver.probed = True
            probe.future().add_done_callback(
                lambda future, i=worker_id, r=receiver: self._events.put(
                    lambda: self._probed(i, r, future)
                )
            )

    def _probed(self, worker_id: int, receiver: _Receiver, future: Future[Any]) -> None:
        receiver.probed = False
        with self._lock:
            self._died(worker_id, receiver, future.exception())


def _offer(publication: Publication) -> MailboxOffer:
    stored: StoredVersion = publication.content
    return MailboxOffer(publication.version, stored.digest, stored.data)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _nothing() -> None:
    return
