"""The trainer's side of sharding: sends each worker the parts of this rank's shard that it wants.

It is made of the scheme's own transport, which need not know of shards: every payload is one of
that transport's versions, and holds the regions that some workers have asked for. Workers that ask
for the same regions share a payload, so that it is packed, or put, once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sync_core import Delivery, Layout, Payload, SenderTransport, TensorSpec, TransportContext
from sync_core.errors import PayloadError, TransportError, WorkerError, WorkerTimeoutError
from sync_core.transports import Notice
from sync_core.wrapping import end_together
from sync_plugin_scale.shards.endpoint import Holding, RankEndpoint, ShardEndpoint
from sync_plugin_scale.shards.late import LateWorkers
from sync_plugin_scale.shards.plan import inside
from sync_plugin_scale.shards.request import ASK, Request, seal

if TYPE_CHECKING:
    from sync_plugin_scale.shards.scheme import Sharded

_log = logging.getLogger("sync_core")
_ASK_LAYOUT = Layout.of_kinds([(ASK, torch.uint8, (1,))])
# How many versions of the inner transport a late answer may be about.
_KEPT = 64


@dataclass(eq=False)
class _ShardWorker:
    """One worker.

    Args:
        asked: the delivery of the payload that it answers, or has answered, by a request; None
            where that was taken.
        request: what it wants of this rank; None before it has answered.
        refused: what is wrong with its newest request; empty for nothing.
        waited: whether a send has waited for it in vain.
        sent: the newest version of which it was sent what it wants; 0 for none.
    """

    asked: Delivery | None = None
    request: Request | None = None
    refused: str = ""
    waited: bool = False
    sent: int = 0


class ShardedSender(SenderTransport):
    """Sends each worker the regions of this rank's shard that it asks for.

    The first send waits for the workers' requests: for an eighth of the deadline before any worker
    is sent something, and for half of it before those that have said nothing count as failed. A
    worker that requests its parts later gets those of the newest version that went to all.

    Args:
        context: what the sender gave to `create_transport`.
        scheme: makes the inner transport.
        holding: what this rank holds.
    """

    def __init__(self, context: TransportContext, scheme: Sharded, holding: Holding) -> None:
        self._timeout = context.timeout
        self._notify = context.notify
        self._holding = holding
        # Of `send` of the inner transport, which one thread calls at a time: workers are added
        # while versions are sent. Callbacks never take it.
        self._lock = threading.RLock()
        self._late = LateWorkers(self._send_late, self._lock)
        self._number = 0
        # The sender's versions, by those of the inner transport, for late answers.
        self._versions: dict[int, int] = {}
        self._layouts: dict[tuple[Request, tuple[TensorSpec, ...]], Layout] = {}
        self._members = {worker_id: _ShardWorker() for worker_id in context.worker_ids}
        self._inner_of: dict[Delivery, Delivery] = {}
        self._inner = scheme.inner_sender(
            context,
            layout=_ASK_LAYOUT,
            models=(),
            layers=(),
            notify=self._hear,
            # The parts are of no use to readers of the inner scheme alone.
            make_address=None,
        )
        self._ask(tuple(self._members))

    def address(self, worker_id: int) -> ShardEndpoint:
        """Return where this rank is reached, and what it holds."""
        return ShardEndpoint((RankEndpoint(self._inner.address(worker_id), self._holding),))

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Send each group of workers that want the same what they want."""
        started = time.monotonic()
        with self._lock:
            self._inner_of = {outer: d for outer, d in self._inner_of.items() if not d.ended}
        # Another thread may remove workers meanwhile.
        members = dict(self._members)
        deliveries = self._send(payload, worker_ids, members, started)
        if members.keys() <= set(worker_ids):
            # After it was sent, while workers take it.
            self._late.keep(payload)
            for worker_id, member in tuple(self._members.items()):
                if member.sent < payload.version:
                    self._late.request(worker_id)
        return deliveries

    def _send(
        self,
        payload: Payload,
        worker_ids: Sequence[int],
        members: Mapping[int, _ShardWorker],
        started: float,
    ) -> dict[int, Delivery]:
        left = [worker_id for worker_id in worker_ids if worker_id in members]
        deliveries = {i: _removed(i, payload) for i in worker_ids if i not in members}
        self._ask([i for i in left if self._must_be_asked(members[i])])
        for share in (8, 2):
            self._learn([members[i] for i in left], started + self._timeout / share)
            known = {i: members[i] for i in left if members[i].request is not None}
            deliveries |= self._send_to_known(known, payload)
            left = [worker_id for worker_id in left if worker_id not in deliveries]
        deliveries |= {i: self._absent(i, members[i], payload) for i in left}
        return {worker_id: deliveries[worker_id] for worker_id in worker_ids}

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait as the inner transport does."""
        deadline = time.monotonic() + timeout
        pairs = [(each, self._inner_of[each]) for each in deliveries if each in self._inner_of]
        self._inner.wait([inner for _, inner in pairs], timeout)
        super().wait(deliveries, max(0.0, deadline - time.monotonic()))
        for outer, inner in pairs:
            outer.remark = inner.remark

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, and ask what it wants."""
        self._inner.add_worker(worker_id, worker)
        self._members[worker_id] = _ShardWorker()
        self._ask((worker_id,))

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker."""
        self._members.pop(worker_id, None)
        self._inner.remove_worker(worker_id)

    def close(self) -> None:
        """Close the inner transport, then end the thread."""
        self._inner.close()
        self._late.close()

    def _ask(self, worker_ids: Sequence[int]) -> None:
        if not worker_ids:
            return
        question = (torch.zeros(1, dtype=torch.uint8, device="cpu"),)
        with self._lock:
            payload = Payload(self._next_number(0), _ASK_LAYOUT, question)
            asked = self._inner.send(payload, worker_ids)
        for worker_id, delivery in asked.items():
            member = self._members.get(worker_id)
            if member is not None:
                member.asked = delivery
                delivery.watch(partial(self._answered, member))

    def _answered(self, member: _ShardWorker, inner: Delivery, error: WorkerError | None) -> None:
        """Note that a worker, or another in its place, answers by what it wants."""
        del error
        if inner.latest is not None and inner.latest.request is not None:
            member.asked, member.request, member.sent = inner, None, 0
            self._late.request(inner.worker_id)

    def _send_late(self, worker_id: int, newest: Payload) -> None:
        """Send a worker its parts of the newest version, unless it was sent those."""
        member = self._members.get(worker_id)
        if member is None or member.sent >= newest.version:
            return
        self._take_request(member)
        if member.request is not None:
            for delivery in self._send_to({worker_id: member}, member.request, newest).values():
                delivery.watch(partial(_report_late, self._notify))

    def _must_be_asked(self, member: _ShardWorker) -> bool:
        """Return whether a question has ended without a request, as its worker was lost."""
        asked = member.asked
        return (
            member.request is None
            and asked is not None
            and asked.ended
            and self._request_in(member, asked) is None
        )

    def _learn(self, members: Sequence[_ShardWorker], deadline: float) -> None:
        """Take the workers' requests; of those that never had one, wait for it."""
        awaited = [m.asked for m in members if m.request is None and m.asked and not m.waited]
        if awaited:
            self._inner.wait(awaited, max(0.0, deadline - time.monotonic()))
        for member in members:
            self._take_request(member)

    def _take_request(self, member: _ShardWorker) -> None:
        """Take the request that a worker has answered by, if it has."""
        asked = member.asked
        if asked is None or not asked.ended:
            return
        request = self._request_in(member, asked)
        if request is not None:
            member.request, member.asked = request, None

    def _request_in(self, member: _ShardWorker, asked: Delivery) -> Request | None:
        member.refused = ""
        if asked.latest is None or asked.latest.request is None:
            return None
        try:
            return Request.from_text(asked.latest.request, self._holding.tensors)
        except PayloadError as error:
            _log.warning("worker %d asks for what there is not: %s", asked.worker_id, error)
            member.refused = str(error)
            return None

    def _send_to_known(
        self, members: Mapping[int, _ShardWorker], payload: Payload
    ) -> dict[int, Delivery]:
        groups: dict[Request, dict[int, _ShardWorker]] = {}
        for worker_id, member in members.items():
            if member.request is not None:
                groups.setdefault(member.request, {})[worker_id] = member
        deliveries: dict[int, Delivery] = {}
        for request, group in groups.items():
            try:
                deliveries |= self._send_to(group, request, payload)
            except Exception as error:
                # The sender reports the error for all workers, if none was sent anything.
                if not deliveries:
                    raise
                deliveries |= {i: _failed(i, payload, error) for i in group}
        return deliveries

    def _send_to(
        self, members: Mapping[int, _ShardWorker], request: Request, payload: Payload
    ) -> dict[int, Delivery]:
        count = len(self._holding.tensors)
        extras = payload.layout.specs[count:]
        layout = self._layout_of(request, extras)
        tensors, held = payload.tensors, self._holding.tensors
        parts = [tensors[i][inside(region, held[i].region)] for i, region in request.regions]
        others = [torch.tensor([payload.version], device="cpu"), *tensors[count:]]
        sums = [seal(parts, others)] if self._holding.verified else []
        parts += [others[0], *sums, *others[1:]]
        with self._lock:
            number = self._next_number(payload.version)
            packed = Payload(number, layout, parts, packing=payload.packing)
            sent = self._inner.send(packed, tuple(members))
            deliveries = {}
            for worker_id, inner in sent.items():
                delivery = Delivery(worker_id, payload.version, inner.nbytes)
                deliveries[worker_id] = delivery
                self._inner_of[delivery] = inner
                end_together(delivery, inner)
                members[worker_id].sent = payload.version
        for worker_id, delivery in deliveries.items():
            sent[worker_id].watch(partial(self._forward, delivery, members[worker_id]))
        return deliveries

    def _layout_of(self, request: Request, extras: Sequence[TensorSpec]) -> Layout:
        known = request, tuple(extras)
        layout = self._layouts.get(known)
        if layout is None:
            if len(self._layouts) > 2 * len(self._members):
                # Workers that come and go may each ask for something else.
                self._layouts.clear()
            holding = self._holding
            layout = request.layout(holding.tensors, extras, verified=holding.verified)
            self._layouts[known] = layout
        return layout

    def _forward(
        self, delivery: Delivery, member: _ShardWorker, inner: Delivery, error: WorkerError | None
    ) -> None:
        """Report the outcome of an inner delivery, under the sender's version."""
        if error is not None and error is delivery.error:
            return  # the send was given up: see `end_together`
        # Another receiver, which wants other regions, may have come in the worker's place.
        self._answered(member, inner, error)
        answer = inner.latest
        delivery.nbytes, delivery.changed = inner.nbytes, inner.changed
        delivery.base = self._versions.get(inner.base, 0)
        if answer is not None and (error is None or answer.error is not None):
            delivery.acknowledge(replace(answer, version=delivery.version))
        elif error is not None:
            delivery.fail(error)
        else:
            delivery.acknowledge()

    def _absent(self, worker_id: int, member: _ShardWorker, payload: Payload) -> Delivery:
        member.waited = True
        delivery = Delivery(worker_id, payload.version, 0)
        if member.asked is not None and member.asked.error is not None and not member.refused:
            delivery.fail(member.asked.error)  # it has left, or cannot receive
            return delivery
        rank = self._holding.rank
        if member.refused:
            remedy = "make its Receiver again, with the same release of sync-core as the trainer's"
            message = f"has sent rank {rank} what is {member.refused}; {remedy}"
            delivery.fail(WorkerError(worker_id, message))
            return delivery
        delivery.fail(
            WorkerTimeoutError(
                worker_id,
                f"has not said what it wants of rank {rank} within "
                f"{self._timeout / 2:g} s; has it made a Receiver(join_addresses([…]), model)?",
            )
        )
        return delivery

    def _hear(self, worker_id: int, notice: Notice) -> None:
        """Take what the inner transport knows of a worker, under the sender's version."""
        if notice.kind != "acknowledged":
            self._notify(worker_id, notice)
        elif version := self._versions.get(notice.version):
            self._notify(worker_id, replace(notice, version=version))

    def _next_number(self, version: int) -> int:
        self._number += 1
        self._versions[self._number] = version
        self._versions.pop(self._number - _KEPT, None)
        return self._number


def _removed(worker_id: int, payload: Payload) -> Delivery:
    delivery = Delivery(worker_id, payload.version, 0)
    delivery.fail(WorkerError(worker_id, "was removed from the sender"))
    return delivery


def _failed(worker_id: int, payload: Payload, cause: Exception) -> Delivery:
    delivery = Delivery(worker_id, payload.version, 0)
    error = TransportError(worker_id, f"could not send version {payload.version}: {cause!r}")
    error.__cause__ = cause
    delivery.fail(error)
    return delivery


def _report_late(
    notify: Callable[[int, Notice], None], delivery: Delivery, error: WorkerError | None
) -> None:
    """Report that a late worker has committed what it was sent, of which no send knows."""
    if error is None:
        notify(delivery.worker_id, Notice("acknowledged", delivery.version))
