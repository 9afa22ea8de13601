"""The pull direction without a sender: a receiver that asks a function for the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from sync_core import registry
from sync_core.address import Address
from sync_core.checks import check_layers
from sync_core.errors import OptionError
from sync_core.hooks import BindContext, SendContext, TransportContext, hookimpl
from sync_core.layers import bind, declares, in_order, travels
from sync_core.models.binding import Binding
from sync_core.models.extract import Strategy, named_tensors
from sync_core.stack import Defaults, PushCounter, Stack
from sync_core.transports.transport import Answer, ReceiverTransport
from sync_core.weights.extras import attached
from sync_core.weights.payload import Payload, Update

_MODEL_ID = "policy"
_WORKER_ID = 0


@dataclass(frozen=True)
class GetterScheme:
    """A scheme for receivers only, whose every `receive` calls a function.

    Args:
        getter: gives a module, a TensorDict or a state_dict; or None when there is nothing new.
        layers: names or objects of layers.
        strategy: how a module is read.
    """

    getter: Callable[[], Any]
    layers: tuple[Any, ...]
    strategy: Strategy
    capabilities = frozenset({"pull"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> ReceiverTransport:
        """The receiver's side; there is no other."""
        if context.side == "sender":
            raise OptionError("a getter is not a sender; use it by Receiver.from_getter()")
        backend = registry.find(registry.SCHEMES, self)
        layers = [registry.find(registry.LAYERS, layer) for layer in self.layers]
        sender = BindContext(side="sender", model_id=_MODEL_ID)
        layers = in_order(bind(layer, sender) for layer in layers)
        return GetterTransport(self, Stack(Defaults(self.strategy), backend, layers))


def address_of(
    getter: Callable[[], Any], model: Any, layers: Sequence[Any], strategy: Strategy
) -> Address:
    """The address of a receiver that has a getter, and no sender."""
    check_layers(layers)
    layout = Binding(model, strategy).layout
    found = [registry.find(registry.LAYERS, layer) for layer in layers]
    travelling = tuple(compress(layers, map(travels, found)))
    return Address(
        scheme=GetterScheme(getter, tuple(layers), strategy),
        layers=travelling,
        layouts=(layout,) * len(travelling),
        options={},
        worker_id=_WORKER_ID,
        model_id=_MODEL_ID,
        endpoint=None,
        token="",
        strategy=strategy,
        zero_copy=False,
        partial=False,
        cast=declares("cast", found),
        verify=None,
        timeout=60.0,
        layout=layout,
        source_layout=layout,
    )


class GetterTransport(ReceiverTransport):
    """Asks the function, and lets the layers change what it gives.

    Args:
        scheme: has the function.
        stack: the layers on the sender's side.
    """

    def __init__(self, scheme: GetterScheme, stack: Stack) -> None:
        self._scheme = scheme
        self._stack = stack
        self._cadence = PushCounter(stack, _MODEL_ID)
        self._version = 0

    def receive(self, timeout: float) -> Payload | None:
        del timeout
        weights = self._scheme.getter()
        if weights is None or not self._cadence.due((_WORKER_ID,), self._version):
            return None
        self._version += 1
        update = self.prepare(weights)
        return Payload(self._version, *attached(update))

    def prepare(self, weights: Any) -> Update:
        """The weights as they travel, changed by the layers."""
        context = SendContext(model_id=_MODEL_ID, version=self._version, worker_ids=(_WORKER_ID,))
        update = Update.of(named_tensors(weights, self._scheme.strategy))
        return self._stack.prepare_weights(update, context)

    def acknowledge(self, answer: Answer) -> None:
        """Count a commit, for layers that skip updates; there is no sender to answer."""
        if answer.error is None:
            self._cadence.reached((_WORKER_ID,))

    def close(self) -> None:
        """Nothing is held."""
