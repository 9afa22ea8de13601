"""The sender's side of incremental versions: between the sender and its scheme's transport.

A version arrives here whole, after all layers. The transport is given a payload of bytes like any
other: the version with a description of itself, or an increment. Workers that can use
the same increment share it. Each payload has its own number, since the transport may be given
two for one version; the version's own number travels inside.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sync_core import (
    Answer,
    CorruptionError,
    Delivery,
    Layout,
    Payload,
    SenderTransport,
    TransportContext,
    TransportError,
    WorkerError,
)
from sync_core.transports import Notice, Publication, Roster
from sync_core.wrapping import end_together
from sync_plugin_scale.increments.errors import IncrementError
from sync_plugin_scale.increments.history import IncrementHistory, described
from sync_plugin_scale.increments.options import Increments
from sync_plugin_scale.increments.patch import Patch
from sync_plugin_scale.resending import PayloadNumbers

_log = logging.getLogger("sync_core")
# How long closing waits for a version that is being sent again, in seconds.
_PATIENCE = 1.0


class _Line:
    """The versions of one layout: what changed in them, and how they are sent.

    Args:
        options: see `sync_plugin_scale.Increments`.
    """

    def __init__(self, options: Increments) -> None:
        self.history = IncrementHistory(options.below)
        self.last_whole = 0


@dataclass(eq=False)
class _Recipient:
    """A worker: what it holds, and what the transport has for it.

    Args:
        worker_id: its id.
        whole: the version that the transport has for it in a form that needs no base.
        line: the versions among which is the one that it was sent last; None before the first.
        held: the newest of them that it holds completely; 0 for none.
        outgoing: the delivery of that version; None before the first.
        inner: the transport's delivery that brings it; None while none does.
    """

    worker_id: int
    whole: int = 0
    line: _Line | None = None
    held: int = 0
    outgoing: Delivery | None = None
    inner: Delivery | None = None


@dataclass(frozen=True, slots=True)
class _PayloadPart:
    """One payload of a version, its workers, and the share of the version that it brings."""

    payload: Payload
    worker_ids: Sequence[int]
    changed: float


class IncrementalSender(SenderTransport):
    """Sends each worker what it lacks, by the scheme's transport.

    Args:
        context: what the sender gave to `create_transport`.
        options: the scheme, with its options.
    """

    def __init__(self, context: TransportContext, options: Increments) -> None:
        assert context.layout is not None
        self._options = options
        self._notify = context.notify
        self._lines: dict[Layout, _Line] = {}
        self._numbers = PayloadNumbers()
        # Held while the transport's methods are called, and histories are used.
        self._calling = threading.Lock()
        # For what is known of workers; no other lock is taken with it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._workers = {i: _Recipient(i) for i in context.worker_ids}
        self._roster = Roster((), context.notify)
        for worker_id, worker in self._workers.items():
            self._roster.add(worker_id, worker)
        # The version that the transport gives workers that join, where it is whole.
        self._whole_to_new = 0
        self._requests: queue.SimpleQueue[_Recipient | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._transport = options.inner_sender(
            context, layout=described(context.layout), notify=self._heard
        )

    def address(self, worker_id: int) -> Any:
        """Return the transport's endpoint."""
        return self._transport.address(worker_id)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Send an increment to workers that can use it, and the whole version to the others."""
        version = payload.version
        with self._calling:
            line = self._lines.get(payload.layout) or _Line(self._options)
            self._lines[payload.layout] = line
            # Workers that may yet ask for an older version can get some of those from here alone.
            asked = self._roster.owed(besides=worker_ids)
            line.history.record(payload, keep=any(each.content is line for each in asked))
            outgoing = self._roster.publish(Publication(version, 0, line), worker_ids)
            held: dict[int, int] = {}
            with self._lock:
                for worker in filter(None, map(self._workers.get, worker_ids)):
                    if worker.line is not line:
                        # It holds nothing of this layout.
                        worker.line, worker.held = line, 0
                    worker.outgoing = outgoing[worker.worker_id]
                    held[worker.worker_id] = worker.held
            for delivery in outgoing.values():
                delivery.watch(self._ended)
            for number, part in enumerate(self._divide(line, version, held)):
                try:
                    self._hand_over(part, packing=payload.packing)
                except Exception as error:
                    if not number:
                        raise
                    # Other workers have been sent the version.
                    for worker_id in part.worker_ids:
                        message = f"version {version} could not be sent: {error!r}"
                        failure = TransportError(worker_id, message)
                        self._roster.failed(worker_id, None, version, failure)
            self._forget()
        return outgoing

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait by the transport, also for what is sent again."""
        deadline = time.monotonic() + timeout
        under_way = self._under_way(deliveries)
        while under_way and (left := deadline - time.monotonic()) > 0:
            if carrying := [*filter(None, under_way.values())]:
                self._transport.wait(carrying, left)
            with self._lock:
                before = under_way
                while (under_way := self._under_way(deliveries)) == before and left > 0:
                    left = deadline - time.monotonic()
                    self._changed.wait(max(0.0, left))
        for delivery, inner in under_way.items():
            delivery.remark = inner.remark if inner is not None else ""

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which gets the newest version that went to all, whole."""
        with self._calling:
            added = self._workers[worker_id] = _Recipient(worker_id, self._whole_to_new)
            owed = self._roster.add(worker_id, added)
            added.line = None if owed is None else owed.content
            try:
                self._transport.add_worker(worker_id, worker)
            except BaseException:
                del self._workers[worker_id]
                self._roster.remove(worker_id)
                raise
        self._request(added)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        with self._calling:
            del self._workers[worker_id]
            # First, so that the roster ends no delivery of the transport with its lock held.
            self._transport.remove_worker(worker_id)
            self._roster.remove(worker_id)

    def close(self) -> None:
        """Close the transport, then end the thread."""
        self._requests.put(None)
        self._transport.close()
        self._roster.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _divide(self, line: _Line, version: int, held: Mapping[int, int]) -> list[_PayloadPart]:
        """Return the payloads of a version, each with its workers."""
        patch = self._best_increment(line, version, sorted({*held.values()} - {0}))
        some = () if patch is None else [i for i, have in held.items() if have >= patch.base]
        others = [i for i in held if i not in some]
        parts = []
        if others:
            whole = line.history.at(version)
            assert whole is not None
            parts.append(_PayloadPart(whole, others, 1.0))
        if patch is None:
            line.last_whole = version
        else:
            increment = patch.to_payload(self._options.compress)
            parts.append(_PayloadPart(increment, some, len(patch.values) / max(1, patch.size)))
        return parts

    def _best_increment(self, line: _Line, version: int, held: Sequence[int]) -> Patch | None:
        """Return the increment that most workers can use, if there is one."""
        every = self._options.whole_every
        if every is not None and version - line.last_whole >= every:
            return None
        return next(filter(None, map(line.history.since, held)), None)

    def _hand_over(self, part: _PayloadPart, **changed: Any) -> None:
        """Give the transport one payload under the next number."""
        version, whole = part.payload.version, not part.payload.base
        number = self._numbers.take(version)
        with self._lock:
            for worker_id in part.worker_ids:
                self._workers[worker_id].inner = None
        payload = replace(part.payload, version=number, **changed)
        deliveries = self._transport.send(payload, part.worker_ids)
        if self._workers.keys() <= deliveries.keys():
            self._whole_to_new = version if whole else 0
        for worker_id, delivery in deliveries.items():
            worker = self._workers[worker_id]
            outgoing = worker.outgoing
            if outgoing is not None:
                outgoing.nbytes += delivery.nbytes
                outgoing.base, outgoing.changed = part.payload.base, part.changed
                end_together(outgoing, delivery)
            with self._lock:
                worker.inner, worker.whole = delivery, version if whole else 0
                self._changed.notify_all()
            delivery.watch(partial(self._answered, worker, outgoing, version=version, whole=whole))

    def _under_way(self, deliveries: Sequence[Delivery]) -> dict[Delivery, Delivery | None]:
        """Return those that have not ended, each with the transport's delivery that brings it."""
        with self._lock:
            under_way: dict[Delivery, Delivery | None] = {}
            for delivery in deliveries:
                if not delivery.ended:
                    worker = self._workers.get(delivery.worker_id)
                    under_way[delivery] = None
                    if worker is not None and worker.outgoing is delivery:
                        under_way[delivery] = worker.inner
            return under_way

    def _ended(self, outgoing: Delivery, error: WorkerError | None) -> None:
        del outgoing, error
        with self._lock:
            self._changed.notify_all()

    def _answered(
        self,
        worker: _Recipient,
        outgoing: Delivery | None,
        delivery: Delivery,
        error: WorkerError | None,
        *,
        version: int,
        whole: bool,
    ) -> None:
        """A delivery of the transport has ended, or had another outcome later."""
        with self._lock:
            given_up = outgoing is not None and error is outgoing.error  # see `end_together`
            if error is not None and (given_up or worker.inner is not delivery):
                return  # the send was given up, or another delivery brings the version now
            lacks = self._learn(worker, error, version)
        if lacks:
            # As another receiver would, which has taken its place.
            self._notify(delivery.worker_id, Notice("connected"))
        if isinstance(error, IncrementError) and not whole and self._request(worker):
            return
        answer = delivery.latest
        if error is None or (answer is not None and answer.error is not None):
            answer = replace(answer or Answer(version=version), version=version)
            self._roster.answered(worker.worker_id, worker, answer)
        elif outgoing is not None:
            self._roster.failed(worker.worker_id, worker, version, error)

    @staticmethod
    def _learn(worker: _Recipient, error: WorkerError | None, version: int) -> bool:
        """Note what a worker holds now; True where it has lost what it held."""
        if error is None:
            worker.held = max(worker.held, version)
            return False
        if not isinstance(error, IncrementError | CorruptionError):
            return False
        held, worker.held = worker.held, 0
        return held > 0

    def _heard(self, worker_id: int, notice: Notice) -> None:
        """The transport knows something of a worker."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if notice.kind == "acknowledged":
            version = self._numbers.version_of(notice.version)
            if version:
                with self._lock:
                    self._learn(worker, None, version)
                self._roster.answered(worker_id, worker, Answer(version=version))
            return
        if notice.kind == "connected":
            with self._lock:
                worker.held = 0
        self._notify(worker_id, notice)
        # A receiver that cannot use the increment on its way refuses it. Sent again before
        # that, a version whose answer is on its way too would wait for another one.
        under_way = worker.outgoing
        if notice.kind == "connected" and (under_way is None or under_way.ended):
            self._request(worker)

    def _request(self, worker: _Recipient) -> bool:
        """Have a worker sent what it wants whole, unless the transport has that for it already."""
        if self._lacking(worker) is None:
            return False
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="sync-increments", daemon=True
                )
                self._thread.start()
        self._requests.put(worker)
        return True

    def _lacking(self, worker: _Recipient) -> Publication | None:
        """Return what a worker is owed, and the transport does not have whole for it."""
        owed = self._roster.wanted(worker.worker_id, after=worker.whole)
        return None if self._roster.dismissed(worker.worker_id, worker) else owed

    def _serve(self) -> None:
        while (worker := self._requests.get()) is not None:
            try:
                with self._calling:
                    self._send_again(worker)
            except Exception as error:
                _log.exception("worker %d could not be sent a whole version", worker.worker_id)
                self._fail(worker, f"could not be sent the version again: {error!r}")

    def _send_again(self, worker: _Recipient) -> None:
        """Send a worker what it wants whole."""
        owed = self._lacking(worker)
        if owed is None:
            return
        whole = owed.content.history.at(owed.version)
        if whole is not None:
            self._hand_over(_PayloadPart(whole, [worker.worker_id], 1.0))
            return
        _log.warning("worker %d gets no version %d: not kept", worker.worker_id, owed.version)
        lacking = f"lacks version {owed.version}, which is not kept; the next send brings all"
        self._fail(worker, lacking)

    def _fail(self, worker: _Recipient, message: str) -> None:
        """Fail what a worker was sent last."""
        if worker.outgoing is not None:
            error = WorkerError(worker.worker_id, message)
            self._roster.failed(worker.worker_id, worker, worker.outgoing.version, error)

    def _forget(self) -> None:
        """Forget what no worker needs any more."""
        oldest: dict[_Line, int] = {}
        for owed in self._roster.owed():
            oldest[owed.content] = min(owed.version, oldest.get(owed.content, owed.version))
        self._lines = {k: line for k, line in self._lines.items() if line in oldest}
        for line, wanted in oldest.items():
            held = [w.held for w in self._workers.values() if w.held and w.line is line]
            line.history.forget(min(held, default=line.history.version), wanted)
