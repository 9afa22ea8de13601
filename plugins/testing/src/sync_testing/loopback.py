"""A whole scheme of one page, for cases that need one and do not care which."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from sync_core import (
    Address,
    Answer,
    Delivery,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.errors import AddressError, WorkerError
from sync_core.transports import Block, Notice

_senders: WeakValueDictionary[str, LoopbackSender] = WeakValueDictionary()


def offered(address: Address) -> Payload | None:
    """Return what the worker of an address was sent last."""
    offer = _senders[address.endpoint].offers[address.worker_id]
    return None if offer is None else offer[0]


@dataclass(frozen=True)
class LoopbackOptions:
    """It has none."""


class Loopback:
    """Weights go through private memory of one process and one thread, so no call waits."""

    capabilities = frozenset({"broadcast", "late_join"})
    endpoint_type = str

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        if context.side == "receiver":
            return LoopbackReceiver(context)
        return LoopbackSender(context)


class LoopbackSender(SenderTransport):
    """Keeps one copy of each version, as long as a worker may ask for it."""

    def __init__(self, context: TransportContext) -> None:
        context.parse_options(LoopbackOptions)
        self.offers: dict[int, tuple[Payload, Delivery] | None] = dict.fromkeys(context.worker_ids)
        self.notify = context.notify
        self._newest: Payload | None = None
        self._name = secrets.token_hex(8)
        _senders[self._name] = self

    def address(self, worker_id: int) -> str:
        """The name under which this process knows the sender."""
        del worker_id
        return self._name

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Copy once for all."""
        block = Block.allocate(payload.nbytes)
        payload.pack(block)
        copy = Payload.unpack(block, payload.version)
        if self.offers.keys() <= set(worker_ids):
            self._newest = copy
        return {worker_id: self._offer(worker_id, copy) for worker_id in worker_ids}

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Offer it what went to all."""
        del worker
        self.offers[worker_id] = None
        if self._newest is not None:
            self._offer(worker_id, self._newest)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        del self.offers[worker_id]

    def close(self) -> None:
        """Release the memory; receivers find that this transport is closed."""
        _senders.pop(self._name, None)
        self.offers.clear()

    def _offer(self, worker_id: int, payload: Payload) -> Delivery:
        delivery = Delivery(worker_id, payload.version, payload.nbytes)
        if worker_id in self.offers:
            self.offers[worker_id] = payload, delivery
        else:
            delivery.fail(WorkerError(worker_id, "was removed from the sender"))
        return delivery


class LoopbackReceiver(ReceiverTransport):
    """Looks into the sender."""

    def __init__(self, context: TransportContext) -> None:
        self._name: str = context.endpoint
        self._worker_id = context.worker_id
        self._seen = 0
        sender = _senders.get(self._name)
        if sender is None:
            raise AddressError("no such sender in this process")
        sender.notify(self._worker_id, Notice("connected"))

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest payload at once; there is only one thread."""
        del timeout
        offer = self._offers().get(self._worker_id)
        if offer is None or offer[0].version <= self._seen:
            return None
        self._seen = offer[0].version
        return offer[0]

    def acknowledge(self, answer: Answer) -> None:
        """Answer at once."""
        offer = self._offers().get(self._worker_id)
        if offer is not None and offer[1].version == answer.version:
            offer[1].acknowledge(answer)

    def close(self) -> None:
        """Nothing is held."""

    def _offers(self) -> dict[int, tuple[Payload, Delivery] | None]:
        sender = _senders.get(self._name)
        if sender is None:
            raise SenderLostError("the sender was closed")
        if self._worker_id not in sender.offers:
            raise SenderLostError(f"worker {self._worker_id} was removed")
        return sender.offers
