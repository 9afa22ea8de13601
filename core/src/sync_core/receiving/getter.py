"""The pull direction without a sender: a receiver that asks a function for the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sync_core.errors import OptionError
from sync_core.models.binding import Binding
from sync_core.models.extract import Strategy, named_tensors
from sync_core.plugins.address import Address
from sync_core.plugins.contexts import TransportContext
from sync_core.plugins.hookspecs import hookimpl
from sync_core.transports.answer import Answer
from sync_core.transports.transport import ReceiverTransport
from sync_core.weights.payload import Payload
from sync_core.weights.update import Update


@dataclass(frozen=True)
class GetterScheme:
    """A scheme for receivers only, whose every `receive` calls a function.

    Args:
        getter: gives a module, a TensorDict or a state_dict; or None when there is nothing new.
        strategy: how a module is read.
    """

    getter: Callable[[], Any]
    strategy: Strategy
    capabilities = frozenset({"pull"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> ReceiverTransport:
        """The receiver's side; there is no other."""
        if context.side == "sender":
            raise OptionError("a getter is no sender; use it by Receiver.from_getter()")
        return _GetterTransport(self.getter, self.strategy)


def address_of(getter: Callable[[], Any], model: Any, strategy: Strategy) -> Address:
    """The address of a receiver that has a getter, and no sender."""
    return Address(
        scheme=GetterScheme(getter, strategy),
        layers=(),
        options={},
        worker_id=0,
        model_id="policy",
        endpoint=None,
        token="",
        strategy=strategy,
        zero_copy=False,
        partial=False,
        verify=None,
        timeout=60.0,
        layout=Binding(model, strategy).layout,
    )


class _GetterTransport(ReceiverTransport):
    def __init__(self, getter: Callable[[], Any], strategy: Strategy) -> None:
        self._getter = getter
        self._strategy = strategy
        self._version = 0

    def receive(self, timeout: float) -> Payload | None:
        del timeout
        weights = self._getter()
        if weights is None:
            return None
        self._version += 1
        update = Update.of(named_tensors(weights, self._strategy))
        return Payload(self._version, update.layout, update.tensors)

    def acknowledge(self, answer: Answer) -> None:
        """Nobody waits for an answer."""

    def close(self) -> None:
        """Nothing is held."""
