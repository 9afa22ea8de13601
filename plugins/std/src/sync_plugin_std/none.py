"""The scheme ``none``: workers act with the trainer's own model, so nothing has to travel."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sync_core import (
    Answer,
    ApplyContext,
    Delivery,
    Payload,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
    Update,
    hookimpl,
)
from sync_core.transports import Notice

_senders: weakref.WeakValueDictionary[str, NoneSender] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class NoneOptions:
    """The scheme ``none`` has no options."""


class NoneScheme:
    """Versions are counted, and no weights are moved."""

    capabilities = frozenset({"broadcast", "late_join", "same_object"})
    endpoint_type = str

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        if context.side == "receiver":
            return NoneReceiver(context)
        return NoneSender(context)

    @hookimpl
    def apply_weights(self, update: Update, model: Any, context: ApplyContext) -> bool | None:
        """Leave the model as it is; weights given by hand (version 0) are applied."""
        del update, model
        return True if context.version else None


class NoneSender(SenderTransport):
    """Answers for every worker at once."""

    def __init__(self, context: TransportContext) -> None:
        context.parse_options(NoneOptions)
        self._name = secrets.token_hex(8)
        self.newest: dict[int, Payload] = {}
        self._last: Payload | None = None
        self._worker_ids = set(context.worker_ids)
        self._version_for_all = 0
        self._notify = context.notify
        _senders[self._name] = self

    def address(self, worker_id: int) -> str:
        """The name under which this process knows the sender."""
        del worker_id
        return self._name

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Count the version as committed."""
        deliveries = {}
        self._last = payload
        if self._worker_ids == set(worker_ids):
            self._version_for_all = payload.version
        for worker_id in worker_ids:
            self.newest[worker_id] = payload
            deliveries[worker_id] = Delivery(worker_id, payload.version, nbytes=0)
            deliveries[worker_id].acknowledge()
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Count what was sent last as this worker's too: it acts with the same object."""
        del worker
        self._worker_ids.add(worker_id)
        if self._last is not None:
            self.newest[worker_id] = self._last

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        self._worker_ids.discard(worker_id)
        self.newest.pop(worker_id, None)

    def joined(self, worker_id: int) -> None:
        """Report a worker as connected and current: it acts with the same object."""
        self._notify(worker_id, Notice("connected"))
        newest = self.newest.get(worker_id)
        if newest is not None:
            # A worker that was added must have what went to all; the last may have gone to some.
            self._notify(worker_id, Notice("acknowledged", self._version_for_all))
            self._notify(worker_id, Notice("acknowledged", newest.version))

    def close(self) -> None:
        """Release the trainer's tensors."""
        self.newest.clear()
        self._last = None


class NoneReceiver(ReceiverTransport):
    """Tells the version in the trainer's process; elsewhere there is never one."""

    def __init__(self, context: TransportContext) -> None:
        self._sender = _senders.get(context.endpoint)
        self._worker_id = context.worker_id
        self._seen = 0
        if self._sender is not None:
            self._sender.joined(self._worker_id)

    def receive(self, timeout: float) -> Payload | None:
        """The newest version, at once or never."""
        del timeout
        payload = None if self._sender is None else self._sender.newest.get(self._worker_id)
        if payload is None or payload.version <= self._seen:
            return None
        self._seen = payload.version
        return payload

    def acknowledge(self, answer: Answer) -> None:
        """The sender has counted it already."""

    def close(self) -> None:
        """Nothing is held."""
