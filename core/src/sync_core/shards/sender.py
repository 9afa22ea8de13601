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
from typing import Any

import torch
from torch import Tensor

from sync_core import registry
from sync_core.checks import check_layers
from sync_core.errors import (
    AddressError,
    ModelError,
    OptionError,
    PayloadError,
    TransportError,
    WorkerError,
    WorkerTimeoutError,
)
from sync_core.hooks import TransportContext, hookimpl, implemented
from sync_core.registry import ComposedScheme, Plugin
from sync_core.shards.late import LateWorkers
from sync_core.shards.local import LocalShards, Ranks, Regions
from sync_core.shards.plan import inside, shape_of
from sync_core.shards.request import HeldTensor, Holding, Request, ShardEndpoint, seal
from sync_core.shards.whole_model import chained
from sync_core.stack import Defaults, Stack
from sync_core.transports.transport import (
    Delivery,
    Notice,
    ReceiverTransport,
    SenderTransport,
    wait_for_each,
)
from sync_core.weights.layout import ASK, Layout
from sync_core.weights.payload import Payload
from sync_core.wrapping import end_together

_log = logging.getLogger("sync_core")
_ASK_LAYOUT = Layout.of_kinds([(ASK, torch.uint8, (1,))])
# A transport that is made of others has these, if they do.
_KEPT_CAPABILITIES = frozenset(
    {"background", "broadcast", "cross_host", "cross_process", "late_join", "pull"}
)
# How many versions of the inner transport a late answer may be about.
_KEPT = 64
# The arguments of a sender that have no clear meaning with ``ranks=``, and what to type instead.
_NOT_WITH_RANKS = {
    "partial": "ranks might leave out different tensors, so every version is whole; leave out "
    "partial=, and make a sender of the tensors that change: Sender(…, {name: tensor, …}, "
    "model_id='adapter', ranks=…)",
    "only": "every version is whole; leave out only=, and make a sender of the trainable tensors: "
    "Sender(…, {name: tensor, …}, model_id='adapter', ranks=…)",
    "zero_copy": "a tensor of a worker may be put together from parts of several ranks; leave out "
    "zero_copy=",
    "workers": "workers connect by the joined addresses of all ranks; type num_workers=… instead",
    "context": "a sharded model is given itself, not by a path; leave out context=",
    "on_failure": "every rank would start the worker again; type on_failure='quarantine', and "
    "start the worker again with its joined address",
}


def split_layers(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the layers that work on whole tensors by their regions alone, and the others."""
    check_layers(layers)
    found = [(layer, registry.find(registry.LAYERS, layer)) for layer in layers]
    regrouping = [p.object for _, p in found if _declares(p, "regions")]
    return regrouping, [
        layer for layer, p in found if not (_declares(p, "regions") or _declares(p, "checksums"))
    ]


def _declares(layer: Plugin, capability: str) -> bool:
    return capability in getattr(layer.object, "capabilities", ())


def sharded(
    scheme: Any,
    ranks: Ranks | None,
    regions: Regions | None,
    layers: Sequence[Any],
) -> tuple[ShardedScheme, list[Any], Callable[[Any], dict[str, Tensor]]]:
    """Return what a rank's sender is made of: see the argument ``ranks`` of `sync_core.Sender`.

    Returns:
        The scheme, the layers that remain for the sender, and what reads the rank's shards.

    Raises:
        OptionError: ``ranks`` is missing or something else, or with the scheme nothing travels.
    """
    if not isinstance(ranks, Ranks):
        raise OptionError(f"ranks is {ranks!r}; on each rank, give ranks=Ranks(rank, size)")
    shards = LocalShards(regions)
    regrouping, others = split_layers(layers)
    verified = any(
        _declares(registry.find(registry.LAYERS, layer), "checksums") for layer in layers
    )
    composed = ShardedScheme(
        scheme,
        ranks,
        shards,
        regrouping,
        others=others,
        verified=verified,
    )
    return composed, others, shards.read


def check_alone(arguments: Mapping[str, Any]) -> None:
    """Raise `OptionError` for an argument that cannot be given together with ``ranks``."""
    for name, reason in _NOT_WITH_RANKS.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise OptionError(f"{name}= cannot be given with ranks=: {reason}")


def inner_stack(scheme: Any) -> tuple[Plugin, Stack]:
    """A scheme, and what makes its transports."""
    backend = registry.find(registry.SCHEMES, scheme)
    return backend, Stack(Defaults("tensordict"), backend)


class ShardedScheme(ComposedScheme):
    """A scheme whose transports are made of another scheme's, for one rank of a trainer.

    Args:
        inner: the name of the other scheme, or a plugin object.
        ranks: the rank, and how many there are.
        shards: reads the rank's shards; None in a process that has only the address.
        layers: those that rename, fuse and cut tensors; see the capability ``regions`` of layers.
        others: the sender's other layers, which must leave names and shapes as they are.
        verified: whether checksums travel with the parts; the layer ``checksum``.

    Raises:
        OptionError: with the other scheme nothing travels.
    """

    by_parts = True

    def __init__(
        self,
        inner: Any,
        ranks: Ranks,
        shards: LocalShards | None = None,
        layers: Sequence[Any] = (),
        *,
        others: Sequence[Any] = (),
        verified: bool = False,
    ) -> None:
        self.inner = inner
        self.ranks = ranks
        self._shards = shards
        self._layers = layers
        self._others = others
        self._verified = verified
        backend, self._stack = inner_stack(inner)
        if "same_object" in backend.capabilities:
            raise OptionError(
                f"{backend.describe()} moves nothing, so that ranks= is of no use; type "
                "scheme='shm' or 'dist'"
            )
        self.name = backend.name
        self.capabilities = backend.capabilities & _KEPT_CAPABILITIES

    def __reduce__(self) -> tuple[object, tuple[Any, Ranks]]:
        return ShardedScheme, (self.inner, self.ranks)

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's side; a receiver needs the addresses of all ranks."""
        if context.side == "receiver":
            raise AddressError(
                f"this is the address of rank {self.ranks.rank} of {self.ranks.size}; join it with "
                "those of the other ranks: Receiver(join_addresses([…]), model)"
            )
        assert self._shards is not None
        assert context.layout is not None
        if context.workers:
            raise OptionError(
                "ranks= needs workers that connect by addresses; give num_workers, not workers"
            )
        holding = replace(
            _holding(context.layout, self._shards, self.ranks, self._layers, self._others),
            verified=self._verified,
        )
        return ShardedSender(
            context,
            self.name,
            self._stack,
            holding,
            verified=self._verified,
        )


def _holding(
    layout: Layout,
    shards: LocalShards,
    ranks: Ranks,
    layers: Sequence[Any],
    others: Sequence[Any],
) -> Holding:
    """Return what this rank holds, as the layers have changed it."""
    held = []
    for spec in layout.specs:
        region, shape = shards.places.get(spec.name, (None, None))
        if region is None or shape_of(region) != spec.shape:
            raise ModelError(
                f"{_reshaping(others)} changes names or shapes, and has made {spec}; with ranks=, "
                "layers may change dtypes and values, and rename, fuse or split tensors; leave it "
                "out of layers="
            )
        held.append(HeldTensor(spec.name, spec.dtype, region, shape))
    made_of = None
    if layers:
        for tensor in held:
            if tensor.shape is None:
                raise OptionError(
                    f"the shape of the whole tensor {tensor.name!r} is not known on this rank, and "
                    "layers that rename, fuse or split need it; give its regions as (start, stop, "
                    "size)"
                )
        kinds = [(tensor.name, tensor.dtype, tensor.shape or ()) for tensor in held]
        made_of = chained(layers, Layout(Layout.of_kinds(kinds).specs, layout.aliases))
    return Holding(ranks, tuple(held), layout.aliases, made_of)


def _reshaping(layers: Sequence[Any]) -> str:
    """Name the layers that may have changed names or shapes: those that do more than cast."""
    found = [registry.find(registry.LAYERS, layer) for layer in layers]
    changing = [p for p in found if "prepare_weights" in implemented(p.object)]
    suspects = [
        p for p in changing if "cast" not in getattr(p.object, "capabilities", ())
    ] or changing
    return " or ".join(plugin.describe() for plugin in suspects)


@dataclass(eq=False)
class _Member:
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
        scheme: the name of the scheme.
        stack: makes the scheme's own transport.
        holding: what this rank holds.
        verified: whether checksums travel with the parts.
    """

    def __init__(
        self,
        context: TransportContext,
        scheme: str,
        stack: Stack,
        holding: Holding,
        *,
        verified: bool = False,
    ) -> None:
        self._verified = verified
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
        self._layouts: dict[Request, Layout] = {}
        self._members = {worker_id: _Member() for worker_id in context.worker_ids}
        self._inner_of: dict[Delivery, Delivery] = {}
        inner = replace(context, scheme=scheme, layout=_ASK_LAYOUT, models=(), notify=self._hear)
        self._inner = stack.create_sender_transport(inner)
        self._ask(tuple(self._members))

    def address(self, worker_id: int) -> ShardEndpoint:
        """Return where this rank is reached, and what it holds."""
        return ShardEndpoint(self._inner.address(worker_id), self._holding)

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
        members: Mapping[int, _Member],
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
        wait_for_each(deliveries, max(0.0, deadline - time.monotonic()))
        for outer, inner in pairs:
            outer.remark = inner.remark

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, and ask what it wants."""
        self._inner.add_worker(worker_id, worker)
        self._members[worker_id] = _Member()
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
        question = (torch.zeros(1, dtype=torch.uint8),)
        with self._lock:
            payload = Payload(self._next_number(0), _ASK_LAYOUT, question)
            asked = self._inner.send(payload, worker_ids)
        for worker_id, delivery in asked.items():
            member = self._members.get(worker_id)
            if member is not None:
                member.asked = delivery
                delivery.watch(partial(self._answered, member))

    def _answered(self, member: _Member, inner: Delivery, error: WorkerError | None) -> None:
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

    def _must_be_asked(self, member: _Member) -> bool:
        """Return whether a question has ended without a request, as its worker was lost."""
        asked = member.asked
        return (
            member.request is None
            and asked is not None
            and asked.ended
            and self._request_in(member, asked) is None
        )

    def _learn(self, members: Sequence[_Member], deadline: float) -> None:
        """Take the workers' requests; of those that never had one, wait for it."""
        awaited = [m.asked for m in members if m.request is None and m.asked and not m.waited]
        if awaited:
            self._inner.wait(awaited, max(0.0, deadline - time.monotonic()))
        for member in members:
            self._take_request(member)

    def _take_request(self, member: _Member) -> None:
        """Take the request that a worker has answered by, if it has."""
        asked = member.asked
        if asked is None or not asked.ended:
            return
        request = self._request_in(member, asked)
        if request is not None:
            member.request, member.asked = request, None

    def _request_in(self, member: _Member, asked: Delivery) -> Request | None:
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
        self, members: Mapping[int, _Member], payload: Payload
    ) -> dict[int, Delivery]:
        groups: dict[Request, dict[int, _Member]] = {}
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
        self, members: Mapping[int, _Member], request: Request, payload: Payload
    ) -> dict[int, Delivery]:
        layout = self._layouts.get(request)
        if layout is None:
            if len(self._layouts) > 2 * len(self._members):
                # Workers that come and go may each ask for something else.
                self._layouts.clear()
            layout = request.layout(self._holding.tensors, verified=self._verified)
            self._layouts[request] = layout
        tensors, held = payload.tensors, self._holding.tensors
        parts = [tensors[i][inside(region, held[i].region)] for i, region in request.regions]
        parts.append(torch.tensor([payload.version]))
        if self._verified:
            parts.append(seal(parts))
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

    def _forward(
        self, delivery: Delivery, member: _Member, inner: Delivery, error: WorkerError | None
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

    def _absent(self, worker_id: int, member: _Member, payload: Payload) -> Delivery:
        member.waited = True
        delivery = Delivery(worker_id, payload.version, 0)
        rank = self._holding.ranks.rank
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
