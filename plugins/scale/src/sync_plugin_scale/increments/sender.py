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
from sync_core.transports import Notice
from sync_core.wrapping import end_together
from sync_plugin_scale.increments.errors import IncrementError
from sync_plugin_scale.increments.history import IncrementHistory, described
from sync_plugin_scale.increments.options import Increments
from sync_plugin_scale.increments.patch import Patch

_log = logging.getLogger("sync_core")
# How long closing waits for a version that is being sent again, in seconds.
_PATIENCE = 1.0
# The payloads whose numbers are kept, for answers that come late.
_NUMBERS = 1024


class _Outgoing(Delivery):
    """A version on its way to a worker, by one payload or two."""

    def __init__(self, worker_id: int, version: int) -> None:
        self.inner: Delivery | None = None
        super().__init__(worker_id, version, 0)

    @property
    def remark(self) -> str:
        """The transport's clause about a late worker."""
        return "" if self.inner is None else self.inner.remark

    @remark.setter
    def remark(self, remark: str) -> None:
        if self.inner is not None:
            self.inner.remark = remark

    def carry_by(self, inner: Delivery, base: int, changed: float) -> None:
        """Let a delivery of the transport bring the version, or bring it again."""
        self.inner = inner
        self.nbytes += inner.nbytes
        self.base, self.changed = base, changed
        end_together(self, inner)


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
    """A worker's state: the versions that it holds and wants.

    Args:
        worker_id: its id.
        line: the versions among which is the one it wants; None before the first.
        held: the newest version that it holds completely; 0 for none.
        wanted: the newest version meant for it; 0 for none.
        whole: whether the transport has that version for it in a form that needs no base.
        outgoing: the delivery of that version, where a send is to know of it.
    """

    worker_id: int
    line: _Line | None = None
    held: int = 0
    wanted: int = 0
    whole: bool = True
    outgoing: _Outgoing | None = None


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
        self._numbers: dict[int, int] = {}
        self._number = 0
        # Held while the transport's methods are called, and histories are used.
        self._calling = threading.Lock()
        # For what is known of workers; no other lock is taken with it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._workers = {i: _Recipient(i) for i in context.worker_ids}
        # As that of a worker that joins: the newest version that went to all.
        self._joining = _Recipient(-1)
        self._requests: queue.SimpleQueue[_Recipient | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._transport = options.inner_sender(
            context, layout=described(context.layout), notify=self._heard
        )

    def address(self, worker_id: int) -> Any:
        """Return the transport's endpoint."""
        return self._transport.address(worker_id)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Send an increment to workers that can use it, and the whole version to the others."""
        version = payload.version
        outgoing = {i: _Outgoing(i, version) for i in worker_ids}
        with self._calling:
            line = self._lines.setdefault(payload.layout, _Line(self._options))
            self._record(line, payload, worker_ids)
            with self._lock:
                to_all = self._workers.keys() <= outgoing.keys()
                workers = {i: self._workers[i] for i in worker_ids if i in self._workers}
                for worker_id, worker in workers.items():
                    if worker.line is not line:
                        # It holds nothing of this layout.
                        worker.line, worker.held = line, 0
                    worker.wanted, worker.outgoing = version, outgoing[worker_id]
                held = {i: workers[i].held if i in workers else 0 for i in worker_ids}
            parts = self._divide(line, version, held)
            for number, part in enumerate(parts):
                try:
                    self._hand_over(part, outgoing, packing=payload.packing)
                except Exception as error:
                    if not number:
                        raise
                    # Other workers have been sent the version.
                    for worker_id in part.worker_ids:
                        message = f"version {version} could not be sent: {error!r}"
                        self._fail(outgoing[worker_id], TransportError(worker_id, message))
            if to_all:
                whole = len(parts) == 1 and not parts[0].payload.base
                self._joining = _Recipient(-1, line, wanted=version, whole=whole)
            self._forget()
        return dict(outgoing)

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait by the transport, also for what is sent again."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            with self._lock:
                under_way = {d: getattr(d, "inner", None) for d in deliveries if not d.ended}
            if not under_way or left <= 0:
                return
            if inner := [each for each in under_way.values() if each is not None]:
                self._transport.wait(inner, left)
            with self._lock:
                left = deadline - time.monotonic()
                self._changed.wait_for(partial(_got_on, under_way), max(0.0, left))

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which gets the newest version that went to all, whole."""
        with self._calling:
            with self._lock:
                added = replace(self._joining, worker_id=worker_id)
                self._workers[worker_id] = added
            try:
                self._transport.add_worker(worker_id, worker)
            except BaseException:
                with self._lock:
                    del self._workers[worker_id]
                raise
        self._request(added)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        with self._calling:
            with self._lock:
                worker = self._workers.pop(worker_id)
            self._transport.remove_worker(worker_id)
        if worker.outgoing is not None:
            self._fail(worker.outgoing, WorkerError(worker_id, "was removed from the sender"))

    def close(self) -> None:
        """Close the transport, then end the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
            outgoing = [worker.outgoing for worker in self._workers.values()]
        self._requests.put(None)
        self._transport.close()
        for each in outgoing:
            if each is not None:
                self._fail(each, WorkerError(each.worker_id, "the sender was closed"))
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _record(self, line: _Line, payload: Payload, worker_ids: Sequence[int]) -> None:
        """Make a payload the newest version of its line."""
        with self._lock:
            others = [w for i, w in self._workers.items() if i not in worker_ids]
            # Those that may yet ask for an older version; some can get that from here alone.
            asking = [w for w in (*others, self._joining) if others and w.line is line and w.wanted]
        line.history.record(payload, keep=bool(asking))

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

    def _hand_over(
        self, part: _PayloadPart, outgoing: Mapping[int, _Outgoing], **changed: Any
    ) -> None:
        """Give the transport one payload under the next number."""
        version, whole = part.payload.version, not part.payload.base
        self._number = max(self._number + 1, version)
        self._numbers[self._number] = version
        if len(self._numbers) > _NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        with self._lock:
            workers = {i: self._workers[i] for i in part.worker_ids if i in self._workers}
            for worker in workers.values():
                worker.whole = whole
        payload = replace(part.payload, version=self._number, **changed)
        try:
            deliveries = self._transport.send(payload, part.worker_ids)
        except BaseException:
            with self._lock:
                for worker in workers.values():
                    worker.whole = False
            raise
        for worker_id, delivery in deliveries.items():
            carried = outgoing.get(worker_id)
            with self._lock:
                if carried is not None:
                    carried.carry_by(delivery, part.payload.base, part.changed)
                self._changed.notify_all()
            known = workers.get(worker_id)
            delivery.watch(partial(self._answered, known, carried, version=version, whole=whole))

    def _answered(
        self,
        worker: _Recipient | None,
        outgoing: _Outgoing | None,
        delivery: Delivery,
        error: WorkerError | None,
        *,
        version: int,
        whole: bool,
    ) -> None:
        """A delivery of the transport has ended, or had another outcome later."""
        if outgoing is not None and error is not None and error is outgoing.error:
            return  # the send was given up: see `end_together`
        with self._lock:
            if error is not None and outgoing is not None and outgoing.inner is not delivery:
                return  # another one brings the version now
            lacks = worker is not None and self._learn(worker, error, version)
        if lacks:
            # As another receiver would, which has taken its place.
            self._notify(delivery.worker_id, Notice("connected"))
        again = isinstance(error, IncrementError) and not whole
        if again and worker is not None and worker.wanted == version and self._request(worker):
            return
        if outgoing is None:
            if error is None:
                self._notify(delivery.worker_id, Notice("acknowledged", version))
            return
        answer = delivery.latest
        if answer is not None and (error is None or answer.error is not None):
            self._acknowledge(outgoing, replace(answer, version=version))
        elif error is None:
            self._acknowledge(outgoing, None)
        else:
            self._fail(outgoing, error)

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

    def _acknowledge(self, outgoing: _Outgoing, answer: Answer | None) -> None:
        outgoing.acknowledge(answer)
        with self._lock:
            self._changed.notify_all()

    def _fail(self, outgoing: _Outgoing, error: WorkerError) -> None:
        outgoing.fail(error)
        with self._lock:
            self._changed.notify_all()

    def _heard(self, worker_id: int, notice: Notice) -> None:
        """The transport knows something of a worker."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if notice.kind == "connected" and worker is not None:
                worker.held = 0
            elif notice.kind == "acknowledged":
                version = self._numbers.get(notice.version)
                if version is None:
                    return
                notice = replace(notice, version=version)
                if worker is not None:
                    worker.held = max(worker.held, version)
        self._notify(worker_id, notice)
        if notice.kind == "connected" and worker is not None:
            under_way = worker.outgoing
            # A receiver that cannot use the increment on its way refuses it. Sent again before
            # that, a version whose answer is on its way too would wait for another one.
            if under_way is None or under_way.ended:
                self._request(worker)

    def _request(self, worker: _Recipient) -> bool:
        """Have a worker sent what it wants whole, unless the transport has that for it already."""
        with self._lock:
            if not self._lacks_whole(worker):
                return False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="sync-increments", daemon=True
                )
                self._thread.start()
        self._requests.put(worker)
        return True

    def _lacks_whole(self, worker: _Recipient) -> bool:
        served = self._workers.get(worker.worker_id) is worker and not self._closed
        return served and bool(worker.wanted) and not worker.whole

    def _serve(self) -> None:
        while (worker := self._requests.get()) is not None:
            try:
                with self._calling:
                    self._send_again(worker)
            except Exception as error:
                _log.exception("worker %d could not be sent a whole version", worker.worker_id)
                message = f"could not be sent version {worker.wanted} again: {error!r}"
                if worker.outgoing is not None:
                    self._fail(worker.outgoing, WorkerError(worker.worker_id, message))

    def _send_again(self, worker: _Recipient) -> None:
        """Send a worker what it wants whole."""
        with self._lock:
            if not self._lacks_whole(worker):
                return
            line, version, outgoing = worker.line, worker.wanted, worker.outgoing
            if outgoing is not None:
                outgoing.inner = None
            alone = len(self._workers) == 1
        whole = None if line is None else line.history.at(version)
        if whole is None:
            _log.warning("worker %d gets no version %d: not kept", worker.worker_id, version)
            if outgoing is not None:
                message = f"lacks version {version}, which is not kept; the next send brings all"
                self._fail(outgoing, WorkerError(worker.worker_id, message))
            return
        carried = {} if outgoing is None else {worker.worker_id: outgoing}
        self._hand_over(_PayloadPart(whole, [worker.worker_id], 1.0), carried)
        if alone and version == self._joining.wanted:
            self._joining.whole = True

    def _forget(self) -> None:
        """Forget what no worker needs any more."""
        with self._lock:
            workers = list(self._workers.values())
        wanting = [w for w in (*workers, self._joining) if w.wanted]
        self._lines = {k: v for k, v in self._lines.items() if any(w.line is v for w in wanting)}
        for line in self._lines.values():
            newest = line.history.version
            served = [w for w in wanting if w.line is line]
            held = min((w.held for w in served if w.held), default=newest)
            line.history.forget(held, min((w.wanted for w in served), default=newest))


def _got_on(under_way: Mapping[Delivery, Delivery | None]) -> bool:
    return any(d.ended or getattr(d, "inner", None) is not i for d, i in under_way.items())
