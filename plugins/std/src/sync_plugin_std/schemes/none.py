"""The scheme ``none``: workers act with the trainer's own model, so nothing has to travel."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sync_core import (
    Answer,
    ApplyContext,
    BindContext,
    ModelError,
    Payload,
    ReceiverTransport,
    SendContext,
    SenderTransport,
    TransportContext,
    Update,
    hookimpl,
)
from sync_core.models import named_tensors
from sync_core.transports import Publication, Roster

_MOVES_NOTHING = "scheme 'none' moves nothing"

_senders: weakref.WeakValueDictionary[str, NoneSender] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class NoneOptions:
    """The scheme ``none`` has no options."""


class NoneScheme:
    """Versions are counted, and no weights are moved.

    Args:
        strategy: how modules are read.
    """

    capabilities = frozenset({"broadcast", "late_join", "same_object"})
    endpoint_type = str

    def __init__(self, strategy: Any = "tensordict") -> None:
        self._strategy = strategy
        # Of the sender; None at a receiver in another process, and before a sender is open.
        self._own: _Own | None = None

    def bind(self, context: BindContext) -> Self:
        """Make the object for one end, whose hooks know the sender's model."""
        bound = copy(self)
        bound._strategy, bound._own = context.strategy, None
        return bound

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        if context.side == "receiver":
            receiver = NoneReceiver(context)
            self._own = receiver.own
            return receiver
        self._own = self._own or _Own()
        return NoneSender(context, self._own)

    @hookimpl
    def prepare_weights(self, update: Update, context: SendContext) -> None:
        """Refuse weights that the sender's model does not have; nothing carries them."""
        if context.own is not None:
            check_same(
                update.items(),
                context.own(),
                f"{_MOVES_NOTHING}: workers act with that model itself; load the weights into it "
                "(model.load_state_dict(…)) and send nothing else, or use scheme='thread'",
            )
        elif context.model is not None:
            self._own = self._own or _Own()
            # Another object, as layers may change the update itself.
            self._own.model = context.model
            self._own.update = Update(update.layout, update.tensors)

    @hookimpl
    def apply_weights(self, update: Update, model: Any, context: ApplyContext) -> bool | None:
        """Leave the model as it is; weights given by hand (version 0) are applied."""
        del update
        if not context.version:
            return None
        own = self._own
        if own is not None and own.update is not None and model is not own.model:
            check_same(
                named_tensors(model, self._strategy).items(),
                dict(own.update.items()),
                f"{_MOVES_NOTHING}: it works only with that model itself; give it to the receiver, "
                "or use scheme='thread'",
            )
        return True


@dataclass
class _Own:
    """The sender's own model, and its tensors, as they were sent last."""

    model: Any = None
    update: Update | None = None


def check_same(given: Iterable[tuple[str, Tensor]], own: Mapping[str, Tensor], advice: str) -> None:
    """Raise `ModelError`, with the advice, unless these are what the sender's model has."""
    for name, tensor in given:
        if name not in own or not _holds_same(tensor, own[name]):
            raise ModelError(f"{name!r} is not what the sender's model has, and {advice}")


def _holds_same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if left.data_ptr() == right.data_ptr() and left.stride() == right.stride():
        return True
    # NaN is equal to nothing, and torch compares not all dtypes.
    return torch.equal(_bits(left), _bits(right.to(left.device)))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    # A copy, since a single element is contiguous whatever its stride.
    return plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


class NoneSender(SenderTransport):
    """Answers for every worker at once.

    Args:
        context: see `TransportContext`.
        own: the sender's model, for receivers in this process.
    """

    def __init__(self, context: TransportContext, own: _Own) -> None:
        context.parse_options(NoneOptions)
        self.own = own
        self._name = secrets.token_hex(8)
        self.roster = Roster(context.worker_ids, context.notify)
        _senders[self._name] = self

    def address(self, worker_id: int) -> str:
        """The name under which this process knows the sender."""
        del worker_id
        return self._name

    def publish(self, payload: Payload) -> Publication:
        """Keep the trainer's tensors."""
        return Publication(payload.version, 0, payload)

    def offer(self, publication: Publication, worker_ids: Sequence[int]) -> None:
        """Count the version as committed."""
        for worker_id in worker_ids:
            self.roster.answered(worker_id, None, Answer(version=publication.version))

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which has each version once it has connected."""
        del worker
        self.roster.add(worker_id)

    def close(self) -> None:
        """Release the trainer's tensors."""
        self.roster.close()
        self.own.model = self.own.update = None


class NoneReceiver(ReceiverTransport):
    """Tells the version in the trainer's process; elsewhere there is never one."""

    def __init__(self, context: TransportContext) -> None:
        self._sender = _senders.get(context.endpoint)
        self.own = None if self._sender is None else self._sender.own
        self._worker_id = context.worker_id
        self._seen = 0
        if self._sender is not None:
            self._sender.connected(self._worker_id, self)

    def receive(self, timeout: float) -> Payload | None:
        """The newest version, at once or never."""
        del timeout
        if self._sender is None:
            return None
        wanted = self._sender.roster.wanted(self._worker_id, after=self._seen)
        if wanted is None:
            return None
        self._seen = wanted.version
        payload: Payload = wanted.content
        return payload

    def acknowledge(self, answer: Answer) -> None:
        """The sender has counted it already."""

    def close(self) -> None:
        """Nothing is held."""
