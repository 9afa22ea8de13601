"""A receiver's model, and how versions are written into it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from sync_core import registry
from sync_core.address import Address
from sync_core.errors import LayoutMismatchError, ModelError, SyncError
from sync_core.hooks import BindContext, implemented
from sync_core.layers import bind, declares, with_layout
from sync_core.models.binding import Binding
from sync_core.models.commit import drop_derived_weights, own_memory
from sync_core.models.extract import check_loading, named_tensors, not_saved
from sync_core.models.lookup import look_up, refers, same
from sync_core.models.match import check_match
from sync_core.registry import Plugin
from sync_core.stack import Defaults, Load, PluginStack
from sync_core.transports.transport import ReceiverTransport
from sync_core.weights.copying import outside_inference_mode
from sync_core.weights.extras import detached
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Payload, Update


class Target:
    """The model of a receiver, with the layers that change a version before it is written.

    Args:
        address: the receiver's.
        model: what is written into; see `register`. None for a model that is registered later.
        context: the object in which string references are looked up.
        load: the worker's own way of loading; see `sync_core.Receiver`.
        consolidate: whether a module's tensors may be moved; see `sync_core.Receiver`.
    """

    def __init__(
        self,
        address: Address,
        model: Any,
        *,
        context: Any,
        load: Load | None,
        consolidate: bool,
    ) -> None:
        backend = registry.find(registry.SCHEMES, address.scheme)
        backend = bind(backend, _context(address, backend, address.layout))
        self.address = address
        self._backend = backend
        self._context = context
        self._load = load
        #: The extras of the last version; layers have taken out theirs.
        self.extras: dict[str, Tensor] = {}
        #: The payload that the model views until the next version, if it does.
        self.lease = LentPayload()
        self._keeps_views = address.zero_copy and load is None
        #: These know whether the last version was loaded, even if a layer raised afterwards.
        self.defaults = Defaults(address.strategy, consolidate=consolidate, load=load)
        found = [registry.find(registry.LAYERS, given) for given in address.layers]
        layers = [
            _bound(address, backend, layer, layout)
            for layer, layout in zip(found, address.layouts, strict=True)
        ]
        #: Whether a version may lack some of the tensors.
        self.partial = declares("partial", found)
        self.stack = PluginStack(self.defaults, backend, layers)
        self._without_layers = PluginStack(self.defaults, backend)
        self._reshapes = any(
            "apply_weights" in implemented(plugin.object) and not declares("checks", [plugin])
            for plugin in (backend, *found)
        )
        #: What was registered.
        self.model: Any = None
        self._refers = False
        #: The layout of the model when it was registered; None where none was checked.
        self._registered: Layout | None = None
        self._ties: Mapping[str, str] | None = None
        #: The model that was written, to which a reference has led.
        self.found: Any = None
        if model is not None:
            self.register(model)

    def connect(self, timeout: float, *, background: bool) -> ReceiverTransport:
        """Make the transport that reads from the sender; see `sync_core.Receiver`."""
        scheme = self._backend.name
        context = self.address.transport_context(scheme, timeout, background=background)
        return self.stack.create_receiver_transport(context)

    def register(self, model: Any) -> None:
        """Write into this model from now on.

        Raises:
            ModelError: it is a reference, and there is no context.
            LayoutMismatchError: it does not fit the sender's.
        """
        by_reference, registered = refers(model), None
        if by_reference:
            if self._context is None:
                raise ModelError(f"{model!r} is looked up in a context: Receiver(…, context=…)")
        elif self._load is None:
            check_loading(model, self.address.strategy)
        if not by_reference and not self._reshapes and self._load is None:
            address = self.address
            registered = Binding(model, address.strategy).layout
            # No version, partial or whole, brings tensors that the sender's model lacks.
            check_match(
                address.layout, registered, cast=address.cast, not_saved=partial(not_saved, model)
            )
        self.model, self._refers, self._registered = model, by_reference, registered
        # As they are now: parameters that view what arrives are as the sender's.
        self._ties = None if registered is None else dict(registered.aliases)

    def model_was_replaced(self) -> bool:
        """Return whether a reference leads to other modules than those that were written."""
        if not self._refers:
            return False
        found = self.found.values() if isinstance(self.found, Mapping) else (self.found,)
        if not all(isinstance(model, nn.Module) for model in found):
            return False
        # A path that leads nowhere is reported by what writes there.
        with suppress(ModelError):
            return not same(look_up(self.model, self._context, self.found), self.found)
        return False

    def write(self, payload: Payload, held: int) -> None:
        """Write a version into the model, which has version ``held``."""
        address, update = self.address, detached(payload)
        self.extras = update.extras
        model = self._resolve()
        try:
            # Tensors that a layer makes in inference mode could not be trained.
            outside_inference_mode(
                self.stack.apply_weights,
                update=update,
                model=model,
                context=address.apply_context(payload.version, held, partial=self.partial),
            )
        except LayoutMismatchError as error:
            if self._was_changed(model):
                raise LayoutMismatchError(
                    f"{error}\n  the model was changed after its Receiver was made; undo that, or "
                    "change the sender's model in the same way, and make a new Sender and new "
                    "Receivers"
                ) from error
            raise
        finally:
            drop_derived_weights()

    def _was_changed(self, model: Any) -> bool:
        """Return whether a model no longer has the layout with which it was registered."""
        if self._registered is None:
            return False
        try:
            check_match(self._registered, Binding(model, self.address.strategy).layout)
        except SyncError:
            return True
        return False

    def write_by_hand(self, weights: Any, prepared: Update | None) -> None:
        """Write weights of the caller's.

        Args:
            weights: what the caller gave.
            prepared: the same as layers have changed it, which they undo here; None where they
                take no part.
        """
        # Of a model that a wrapping scheme has divided.
        if views_of := getattr(self.model, "views_of", None):
            weights = views_of(weights)
        if prepared is None:
            stack, named = self._without_layers, named_tensors(weights, self.address.strategy)
            update = Update.of(named)
        else:
            stack, update = self.stack, prepared
        # What zero-copy parameters view is shared and read-only, so they get their own memory.
        if self.address.zero_copy:
            update = update.copied()
        try:
            context = self.address.apply_context(version=0, partial=self.partial)
            stack.apply_weights(update=update, model=self._resolve(), context=context)
        finally:
            drop_derived_weights()
        self.defaults.loaded = False

    def take_damage(self) -> bool:
        """Return, once, whether the model may hold parts of a version: ``load`` has raised."""
        damaged, self.defaults.loading = self.defaults.loading, False
        return damaged

    def committed(self, payload: Payload) -> None:
        """Release the version that was written, unless the model views it."""
        if self._keeps_views:
            self.lease.replace(self.found, payload, self._ties)
        else:
            payload.release()

    def refused(self, payload: Payload) -> None:
        """Release a version that is not committed."""
        if self._keeps_views and self.found is not None:
            # It may have been pointed at the payload already, unless it cannot be read at all.
            with suppress(ModelError):
                vacate(self.found, payload, self._ties)
        else:
            payload.release()

    def snapshot(self) -> Mapping[str, Tensor] | None:
        """A copy of the model's weights; None where the scheme alone knows how to load them."""
        if self._without_layers.implements("apply_weights") or self._load is not None:
            return None
        named = named_tensors(self._resolve(), self.address.strategy)
        return dict(Update.of(named).copied().items())

    def _resolve(self) -> Any:
        if self.model is None and self._load is None:
            raise ModelError("the receiver has no model; give it one, or call register_model()")
        if self._refers:
            self.found = look_up(self.model, self._context, self.found)
        else:
            self.found = self.model
        return self.found


def _bound(address: Address, backend: Plugin, layer: Plugin, layout: Layout) -> Plugin:
    """Return the layer for one worker, which is given the layout that it has to restore."""
    return with_layout(bind(layer, _context(address, backend, layout)), layout)


def _context(address: Address, backend: Plugin, layout: Layout) -> BindContext:
    return BindContext(
        side="receiver",
        model_id=address.model_id,
        worker_id=address.worker_id,
        layout=layout,
        source_layout=address.source_layout,
        capabilities=backend.capabilities,
        strategy=address.strategy,
    )


class LentPayload:
    """The payload that a model views, and the model; none at first."""

    def __init__(self) -> None:
        self._model: Any = None
        self._payload: Payload | None = None
        self._ties: Mapping[str, str] | None = None

    def replace(self, model: Any, payload: Payload, ties: Mapping[str, str] | None) -> None:
        """The model views this payload now; for ``ties`` see `own_memory`."""
        if self._payload is not None and model is self._model:
            self._payload.release()
        else:
            self.end()
        self._model, self._payload, self._ties = model, payload, ties

    def end(self) -> None:
        """Give the model its own memory."""
        if self._payload is not None:
            vacate(self._model, self._payload, self._ties)
            self._model = self._payload = None


def vacate(model: Any, payload: Payload, ties: Mapping[str, str] | None) -> None:
    """Release a payload, of which the model keeps what it views in its own memory."""
    try:
        own_memory(named_tensors(model), payload.tensors, ties)
    finally:
        payload.release()
