"""Receivers without a sender: each `receive` asks a function of the same process for weights."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from sync_core import (
    Address,
    Answer,
    Delivery,
    OptionError,
    Payload,
    PendingSend,
    Receiver,
    ReceiverTransport,
    Sender,
    SendError,
    SenderTransport,
    SyncError,
    TransportContext,
    Update,
    hookimpl,
    registry,
)
from sync_core.checks import check_function, check_layers
from sync_core.hooks import implemented


def from_getter(
    getter: Callable[[], Any],
    model: Any,
    *,
    layers: Sequence[Any] = (),
    strategy: Literal["tensordict", "state_dict", "checkpoint"] = "tensordict",
) -> Receiver:
    """Return a receiver that has no sender: every `receive` asks a function for the weights.

    Args:
        getter: gives a module, a TensorDict or a state_dict; or None when there is nothing new.
        model: what the weights are committed to.
        layers: names or objects of layers, which change the weights on the way from the function,
            or from `Receiver.apply_weights`, to the model, and may skip what the function gives.
        strategy: see `sync_core.Sender`.

    Example:
        >>> import torch
        >>> server, local = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> from_getter(lambda: server, local).receive()
        1
        >>> torch.equal(server.weight, local.weight)
        True
    """
    check_function(getter, "getter")
    check_layers(layers)
    return Receiver(_address(GetterScheme(getter, layers, strategy), model), model)


def _address(scheme: GetterScheme, model: Any) -> Address:
    """Return an address whose layout is that of the receiver's own model, after all layers."""
    with Sender(scheme, model, num_workers=1, strategy=scheme.strategy) as sender:
        address = sender.address(0)
    found = [registry.find(registry.LAYERS, layer).object for layer in scheme.layers]
    undone = tuple(
        layer
        for layer, made in zip(scheme.layers, found, strict=True)
        if "apply_weights" in implemented(made)
    )
    return replace(
        address,
        layers=undone,
        layouts=(address.layout,) * len(undone),
        cast=any("cast" in getattr(made, "capabilities", ()) for made in found),
    )


class GetterScheme:
    """The scheme of one such receiver.

    Args:
        getter: see `from_getter`.
        layers: see `from_getter`.
        strategy: how a module is read.
    """

    capabilities = frozenset({"pull"})

    def __init__(self, getter: Callable[[], Any], layers: Sequence[Any], strategy: Any) -> None:
        self.getter = getter
        self.layers = tuple(layers)
        self.strategy = strategy

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """Make the side that asks the function, or the one that keeps what the layers made."""
        return _KeepingSender() if context.side == "sender" else GetterReceiver(self)


class GetterReceiver(ReceiverTransport):
    """Asks the function, and has the layers change its result by a private sender.

    Args:
        scheme: has the function and the layers.
    """

    def __init__(self, scheme: GetterScheme) -> None:
        self._getter = scheme.getter
        self._forced = _Forced()
        self._kept = _KeepingSender()
        self._sender = Sender(
            _Keeping(self._kept),
            num_workers=1,
            layers=[*scheme.layers, self._forced],
            strategy=scheme.strategy,
        )
        self._pending: PendingSend | None = None
        self._version = 0

    def receive(self, timeout: float) -> Payload | None:
        del timeout
        weights = self._getter()
        self._end()
        if weights is None:
            return None
        self._pending = self._sender.send_async(weights)
        update = self._kept.take()
        if update is None:
            return None  # a layer has skipped it
        self._version += 1
        return Payload(self._version, update.layout, update.source)

    def acknowledge(self, answer: Answer) -> None:
        """Count a commit, for layers that skip updates."""
        if self._pending is not None and answer.error is None:
            for delivery in self._pending.deliveries.values():
                delivery.acknowledge()
        self._end()

    def prepare(self, weights: Any) -> Update | None:
        """Return weights given by hand as the layers make them, which skip none."""
        self._end()
        self._forced.on = True
        try:
            self._sender.send_async(weights).abandon()
        finally:
            self._forced.on = False
        return self._kept.take()

    def close(self) -> None:
        self._sender.close()

    def _end(self) -> None:
        if self._pending is not None:
            # Not a failure: nothing else has to know what the receiver has reported.
            with suppress(SendError):
                self._pending.wait(0)
            self._pending = None


class _Forced:
    """A layer that lets nothing be skipped, while it is on."""

    on = False

    @hookimpl(wrapper=True)
    def skip_update(self) -> Generator[None, bool, bool]:
        skips = yield
        return skips and not self.on


class _Keeping:
    """A scheme whose sender's side keeps what is sent, whole."""

    capabilities = frozenset({"compares"})

    def __init__(self, kept: _KeepingSender) -> None:
        self._kept = kept

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport:
        if context.side == "receiver":
            raise OptionError("this scheme has no receivers")
        return self._kept


class _KeepingSender(SenderTransport):
    """Keeps the update that was sent last."""

    _update: Update | None = None

    def take(self) -> Update | None:
        """Return what was sent, once."""
        update, self._update = self._update, None
        return update

    def address(self, worker_id: int) -> None:
        del worker_id

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        if not worker_ids:
            raise SyncError("there is one worker")
        self._update = Update(payload.layout, payload.source)
        return {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        del worker_id, worker
        raise OptionError("a getter has one receiver")

    def remove_worker(self, worker_id: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        self._update = None
