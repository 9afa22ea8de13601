"""The trainer's side of sharding: sends each worker the parts of this rank's shard that it wants.

It is made of the scheme's own transport, which need not know of shards: every payload is one of
that transport's versions, and holds the regions that some workers have asked for. Workers that ask
for the same regions share a payload, so that it is packed, or put, once.

A worker that asks late is sent its parts of the newest version that went to all workers. Each rank
does so without the others: a worker commits a version once it has that of all ranks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sync_core import (
    Answer,
    Delivery,
    Layout,
    Payload,
    SenderTransport,
    TensorSpec,
    TransportContext,
)
from sync_core.errors import (
    ClosedError,
    PayloadError,
    TransportError,
    WorkerError,
    WorkerTimeoutError,
)
from sync_core.transports import Block, Notice, Publication, Roster
from sync_core.wrapping import end_together
from sync_plugin_scale.shards.endpoint import Holding, RankEndpoint, ShardEndpoint
from sync_plugin_scale.shards.plan import inside
from sync_plugin_scale.shards.request import ASK, Request, seal

if TYPE_CHECKING:
    from sync_plugin_scale.shards.scheme import Sharded

_log = logging.getLogger("sync_core")
_ASK_LAYOUT = Layout.of_kinds([(ASK, torch.uint8, (1,))])
# How many versions of the inner transport a late answer may be about.
_KEPT = 64
# How long closing waits for a version that is being sent to a late worker, in seconds.
_PATIENCE = 1.0


@dataclass(eq=False)
class _ShardRecipient:
    """A worker of this rank: its request, and the inner transport's delivery to it.

    Args:
        worker_id: its id.
        outgoing: the delivery of the version that it was sent last; None before the first.
        inner: the inner transport's last delivery to it, which it may answer by a request.
        answer: the answer that its newest request came with.
        request: what it wants; None before it has requested something that this rank holds.
        refused: what is wrong with its newest request; empty for nothing.
        waited: whether a send has waited for its request in vain.
        sent: the version whose parts the inner transport has for it; 0 for none.
    """

    worker_id: int
    outgoing: Delivery | None = None
    inner: Delivery | None = None
    answer: Answer | None = None
    request: Request | None = None
    refused: str = ""
    waited: bool = False
    sent: int = 0


class ShardedSender(SenderTransport):
    """Sends each worker the regions of this rank's shard that it asks for.

    The first send waits for the workers' requests: for an eighth of the deadline before any worker
    is sent something, and for half of it before those that have said nothing count as failed.

    For workers that request their parts later, it keeps a copy of the newest version that went to
    all. That takes the memory of the rank's shard once more: they may want what no other wants, and
    the trainer changes its model after a send.

    Args:
        context: what the sender gave to `create_transport`.
        scheme: makes the inner transport.
        holding: what this rank holds.
    """

    def __init__(self, context: TransportContext, scheme: Sharded, holding: Holding) -> None:
        self._timeout = context.timeout
        self._notify = context.notify
        self._holding = holding
        # Of the calls of the inner transport, which one thread makes at a time, and of the copy:
        # late workers are served while versions are sent. Callbacks never take it.
        self._lock = threading.RLock()
        self._number = 0
        # The sender's versions, by those of the inner transport, for late answers.
        self._versions: dict[int, int] = {}
        self._layouts: dict[tuple[Request, tuple[TensorSpec, ...]], Layout] = {}
        self._roster = Roster((), context.notify)
        self._recipients: dict[int, _ShardRecipient] = {}
        self._block: Block | None = None
        self._copy: Payload | None = None
        self._requests: queue.SimpleQueue[_ShardRecipient | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._inner = scheme.inner_sender(
            context,
            layout=_ASK_LAYOUT,
            models=(),
            layers=(),
            notify=self._hear,
            # The parts are of no use to readers of the inner scheme alone.
            make_address=None,
        )
        self._ask([self._add(worker_id) for worker_id in context.worker_ids])

    def address(self, worker_id: int) -> ShardEndpoint:
        """Return where this rank is reached, and what it holds."""
        return ShardEndpoint((RankEndpoint(self._inner.address(worker_id), self._holding),))

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Send each group of workers that want the same what they want."""
        started = time.monotonic()
        publication = Publication(payload.version, 0)
        outgoing = self._roster.publish(publication, worker_ids)
        # Another thread may remove workers meanwhile.
        known = dict(self._recipients)
        left = [known[i] for i in worker_ids if i in known]
        for each in left:
            each.outgoing = outgoing[each.worker_id]
        self._ask_again(left)
        results: dict[_ShardRecipient, Exception | None] = {}
        for share in (8, 2):
            results |= self._hand_over(left, payload, started + self._timeout / share)
            left = [each for each in left if each not in results]
        errors = [error for error in results.values() if error is not None]
        if errors and len(errors) == len(results):
            # The sender reports it for all workers.
            raise errors[0]
        results |= {each: self._absence(each) for each in left}
        for each, error in results.items():
            if error is not None:
                self._fail(each, payload.version, error)
        if self._roster.owed_to_new is publication:
            # After it was sent, while workers take it.
            self._keep(payload)
        return outgoing

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait as the inner transport does."""
        deadline = time.monotonic() + timeout
        inner_of = {each.outgoing: each.inner for each in tuple(self._recipients.values())}
        pairs = [(d, inner) for d in deliveries if not d.ended and (inner := inner_of.get(d))]
        self._inner.wait([inner for _, inner in pairs], timeout)
        super().wait(deliveries, max(0.0, deadline - time.monotonic()))
        for outgoing, inner in pairs:
            outgoing.remark = inner.remark

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, and ask what it wants."""
        with self._lock:
            self._inner.add_worker(worker_id, worker)
            try:
                self._ask([self._add(worker_id)])
            except BaseException:
                self.remove_worker(worker_id)
                raise

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker."""
        self._recipients.pop(worker_id, None)
        # First, so that the roster ends no delivery of the transport with its lock held.
        self._inner.remove_worker(worker_id)
        self._roster.remove(worker_id)

    def close(self) -> None:
        """Close the inner transport, then end the thread."""
        self._requests.put(None)
        self._inner.close()
        self._roster.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _add(self, worker_id: int) -> _ShardRecipient:
        added = self._recipients[worker_id] = _ShardRecipient(worker_id)
        self._roster.add(worker_id, added)
        return added

    def _ask(self, recipients: Sequence[_ShardRecipient]) -> None:
        if recipients:
            question = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._give(recipients, Payload(0, _ASK_LAYOUT, (question,)))

    def _ask_again(self, recipients: Sequence[_ShardRecipient]) -> None:
        """Ask those whose question has ended without a request, as they were lost."""
        with self._lock:
            for each in recipients:
                self._take_request(each)
            unknown = [each for each in recipients if each.request is None]
            self._ask([each for each in unknown if each.inner is None or each.inner.ended])

    def _take_request(self, recipient: _ShardRecipient) -> None:
        """Take what a worker, or another in its place, has answered by, if that is new."""
        answer = None if recipient.inner is None else recipient.inner.latest
        if answer is None or answer.request is None or answer is recipient.answer:
            return
        recipient.answer, recipient.sent = answer, 0
        recipient.request, recipient.refused = None, ""
        try:
            recipient.request = Request.from_text(answer.request, self._holding.tensors)
        except PayloadError as error:
            _log.warning("worker %d asks for what there is not: %s", recipient.worker_id, error)
            recipient.refused = str(error)

    def _hand_over(
        self, recipients: Sequence[_ShardRecipient], payload: Payload, deadline: float
    ) -> dict[_ShardRecipient, Exception | None]:
        """Send parts to those that request some by the deadline; return what each raised."""
        # Those that never made a request.
        unknown = [each for each in recipients if each.request is None and not each.waited]
        if awaited := [each.inner for each in unknown if each.inner is not None]:
            self._inner.wait(awaited, max(0.0, deadline - time.monotonic()))
        groups: dict[Request, list[_ShardRecipient]] = {}
        with self._lock:
            for each in recipients:
                self._take_request(each)
                if each.request is not None:
                    groups.setdefault(each.request, []).append(each)
        results: dict[_ShardRecipient, Exception | None] = {}
        for request, group in groups.items():
            try:
                self._send_parts(group, request, payload)
            except Exception as error:
                results |= dict.fromkeys(group, error)
            else:
                results |= dict.fromkeys(group)
        return results

    def _send_parts(
        self, recipients: Sequence[_ShardRecipient], request: Request, payload: Payload
    ) -> None:
        count = len(self._holding.tensors)
        layout = self._layout_of(request, payload.layout.specs[count:])
        tensors, held = payload.tensors, self._holding.tensors
        parts = [tensors[i][inside(region, held[i].region)] for i, region in request.regions]
        others = [torch.tensor([payload.version], device="cpu"), *tensors[count:]]
        sums = [seal(parts, others)] if self._holding.verified else []
        parts += [others[0], *sums, *others[1:]]
        packed = Payload(payload.version, layout, parts, packing=payload.packing)
        self._give(recipients, packed)

    def _give(self, recipients: Sequence[_ShardRecipient], payload: Payload) -> None:
        """Give the inner transport one payload under the next number."""
        version = payload.version
        with self._lock:
            self._number += 1
            self._versions[self._number] = version
            self._versions.pop(self._number - _KEPT, None)
            numbered = replace(payload, version=self._number)
            given = self._inner.send(numbered, [each.worker_id for each in recipients])
            for each in recipients:
                each.inner, each.sent, outgoing = given[each.worker_id], version, each.outgoing
                if outgoing is not None and outgoing.version == version:
                    outgoing.nbytes = each.inner.nbytes
                    end_together(outgoing, each.inner)
                else:
                    outgoing = None
                each.inner.watch(partial(self._answered, each, version, outgoing))

    def _layout_of(self, request: Request, extras: Sequence[TensorSpec]) -> Layout:
        known = request, tuple(extras)
        layout = self._layouts.get(known)
        if layout is None:
            if len(self._layouts) > 2 * len(self._recipients):
                # Workers that come and go may each ask for something else.
                self._layouts.clear()
            holding = self._holding
            layout = request.layout(holding.tensors, extras, verified=holding.verified)
            self._layouts[known] = layout
        return layout

    def _answered(
        self,
        recipient: _ShardRecipient,
        version: int,
        outgoing: Delivery | None,
        inner: Delivery,
        error: WorkerError | None,
    ) -> None:
        """Report an outcome of an inner delivery under the sender's version, 0 for a question."""
        answer = inner.latest
        if answer is not None and answer.request is not None:
            # Of the worker, or of another in its place, which is sent what it wants.
            self._requests.put(recipient)
            if outgoing is None or outgoing.ended:
                return
        if outgoing is not None:
            if error is not None and error is outgoing.error:
                return  # the send was given up: see `end_together`
            outgoing.nbytes, outgoing.changed = inner.nbytes, inner.changed
            outgoing.base = self._versions.get(inner.base, 0)
        if version and (error is None or (answer is not None and answer.error is not None)):
            answer = replace(answer or Answer(version=version), version=version)
            self._roster.answered(recipient.worker_id, recipient, answer)
        elif error is not None and outgoing is not None:
            self._roster.failed(recipient.worker_id, recipient, version, error)

    def _fail(self, recipient: _ShardRecipient, version: int, error: Exception) -> None:
        worker_id = recipient.worker_id
        if not isinstance(error, WorkerError):
            message = f"could not send version {version}: {error!r}"
            cause, error = error, TransportError(worker_id, message)
            error.__cause__ = cause
        self._roster.failed(worker_id, recipient, version, error)

    def _absence(self, recipient: _ShardRecipient) -> WorkerError:
        recipient.waited = True
        worker_id, rank = recipient.worker_id, self._holding.rank
        if recipient.refused:
            remedy = "make its Receiver again, with the same release of sync-core as the trainer's"
            return WorkerError(
                worker_id, f"has sent rank {rank} what is {recipient.refused}; {remedy}"
            )
        if recipient.inner is not None and recipient.inner.error is not None:
            return recipient.inner.error  # it has left, or cannot receive
        return WorkerTimeoutError(
            worker_id,
            f"has not said what it wants of rank {rank} within "
            f"{self._timeout / 2:g} s; has it made a Receiver(join_addresses([…]), model)?",
        )

    def _hear(self, worker_id: int, notice: Notice) -> None:
        """Take what the inner transport knows of a worker, under the sender's version."""
        if notice.kind != "acknowledged":
            self._notify(worker_id, notice)
        elif version := self._versions.get(notice.version):
            self._roster.answered(worker_id, None, Answer(version=version))

    def _keep(self, payload: Payload) -> None:
        """Copy a version over the one before it; workers that lack it are sent their parts of it.

        Without memory for the copy, there is none, and they wait for the next version.
        """
        with self._lock:
            self._copy = None
            if self._block is None or self._block.nbytes < payload.nbytes:
                self._block = None  # so that there are never two
                try:
                    self._block = Block.allocate(payload.nbytes)
                except (MemoryError, OSError, RuntimeError):
                    _log.warning("no memory to keep version %d for late workers", payload.version)
                    return
            # With its own stopwatch: the payload's is the sender's.
            Payload(payload.version, payload.layout, payload.source).pack(self._block)
            self._copy = Payload(payload.version, payload.layout, self._block)
        for recipient in tuple(self._recipients.values()):
            if recipient.sent < payload.version:
                self._requests.put(recipient)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="sync-shards", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (recipient := self._requests.get()) is not None:
            try:
                with self._lock:
                    self._send_copy(recipient)
            except ClosedError:
                return
            except Exception:
                worker_id = recipient.worker_id
                _log.exception("worker %d could not be sent the newest version", worker_id)

    def _send_copy(self, recipient: _ShardRecipient) -> None:
        """Send a worker its parts of the newest version, unless it was sent those."""
        self._take_request(recipient)
        copy, request = self._copy, recipient.request
        if copy is None or request is None or recipient.sent >= copy.version:
            return
        if self._roster.dismissed(recipient.worker_id, recipient):
            return
        self._send_parts([recipient], request, copy)
