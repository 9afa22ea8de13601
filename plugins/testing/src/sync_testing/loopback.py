"""A minimal scheme within one thread, for cases that need any scheme."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from sync_core import (
    Address,
    Answer,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.errors import AddressError
from sync_core.transports import Block, Publication, Roster

_senders: WeakValueDictionary[str, LoopbackSender] = WeakValueDictionary()


def offered(address: Address) -> Payload | None:
    """Return the payload that was last sent to the worker of an address."""
    wanted = _senders[address.endpoint].roster.wanted(address.worker_id)
    return None if wanted is None else wanted.content


@dataclass(frozen=True)
class LoopbackOptions:
    """No options."""


class Loopback:
    """A scheme that passes weights through the memory of one process, without waiting."""

    capabilities = frozenset({"broadcast", "late_join"})
    endpoint_type = str

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """Make the transport of the sender or of a receiver."""
        if context.side == "receiver":
            return LoopbackReceiver(context)
        return LoopbackSender(context)


class LoopbackSender(SenderTransport):
    """Keeps one copy of each version, while a worker may request it."""

    def __init__(self, context: TransportContext) -> None:
        context.parse_options(LoopbackOptions)
        self.roster = Roster(context.worker_ids, context.notify)
        self._name = secrets.token_hex(8)
        _senders[self._name] = self

    def address(self, worker_id: int) -> str:
        """Return the name under which this process finds the sender."""
        del worker_id
        return self._name

    def publish(self, payload: Payload) -> Publication:
        """Copy the payload once for all workers."""
        block = Block.allocate(payload.nbytes)
        payload.pack(block)
        copy = Payload.unpack(block, payload.version)
        return Publication(copy.version, copy.nbytes, copy)

    def offer(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """Do nothing: receivers ask the roster."""

    def close(self) -> None:
        """Release the memory; receivers then raise `SenderLostError`."""
        _senders.pop(self._name, None)
        self.roster.close()


class LoopbackReceiver(ReceiverTransport):
    """Reads versions from the sender's roster."""

    def __init__(self, context: TransportContext) -> None:
        self._worker_id = context.worker_id
        self._seen = 0
        sender = _senders.get(context.endpoint)
        if sender is None:
            raise AddressError("no such sender in this process")
        self._roster = sender.roster
        self._roster.connected(self._worker_id, self)

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest payload, without waiting: there is only one thread."""
        del timeout
        reason = self._roster.dismissed(self._worker_id, self)
        if reason is not None:
            raise SenderLostError(reason)
        wanted = self._roster.wanted(self._worker_id, after=self._seen)
        if wanted is None:
            return None
        self._seen = wanted.version
        payload: Payload = wanted.content
        return payload

    def acknowledge(self, answer: Answer) -> None:
        """Pass the answer to the sender at once."""
        self._roster.answered(self._worker_id, self, answer)

    def close(self) -> None:
        """Do nothing: the receiver holds no resources."""
