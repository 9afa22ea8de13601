"""A sender's layers and transport, and the terms of both ends."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sync_core import registry
from sync_core._util import release_with
from sync_core.address import Address
from sync_core.checks import check_layers
from sync_core.errors import ModelError, OptionError, SyncError, TransportError
from sync_core.hooks import BindContext, SendContext, TransportContext, worker_token
from sync_core.layers import LayerPlan, bind, declares, found_layers
from sync_core.models.extract import Strategy, check_strategy
from sync_core.models.lookup import names_of
from sync_core.registry import Plugin
from sync_core.sending.membership import Membership
from sync_core.sending.source import Source
from sync_core.stack import Defaults, PluginStack, layouts_before
from sync_core.transports.transport import Delivery, SenderTransport, closed_if_it_fails, unheard
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Payload, Update
from sync_core.weights.streamed import TensorStream
from sync_core.wrapping import WrappingScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The arguments of a `sync_core.sending.sender.Sender` on which both sides have to agree.

    Raises:
        OptionError: arguments that no sender can have, or not together.
    """

    scheme: Any
    layers: Sequence[Any]
    options: Mapping[str, Any]
    model_id: str
    strategy: Strategy
    zero_copy: bool
    timeout: float
    cast: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def __post_init__(self) -> None:
        check_layers(self.layers)
        check_strategy(self.strategy)
        if self.zero_copy and self.strategy != "tensordict":
            raise OptionError("zero_copy needs strategy='tensordict'")

    def address_maker(self, **known: Any) -> Callable[..., Address]:
        """Makes addresses from a worker's id and its endpoint; ``known`` are the other fields."""
        make = partial(
            Address,
            options=dict(self.options),
            model_id=self.model_id,
            sender_token=self.token,
            strategy=self.strategy,
            zero_copy=self.zero_copy,
            cast=self.cast,
            timeout=self.timeout,
            **known,
        )
        secret = self.secret

        def make_address(*, worker_id: int, endpoint: Any) -> Address:
            token = worker_token(secret, worker_id)
            return make(worker_id=worker_id, endpoint=endpoint, token=token)

        return make_address


class Pipeline:
    """Layers change an update here, and the transport takes it away.

    Args:
        terms: what the sender was asked for.

    Raises:
        PluginError: the scheme or a layer cannot be found or used.
        OptionError: the scheme cannot do what is asked of it.
    """

    def __init__(self, terms: Terms) -> None:
        found = found_layers(terms.layers)
        cast = declares("cast", [layer for _, layer in found])
        self._terms = replace(terms, cast=cast, layers=tuple(terms.layers))
        scheme = registry.find(registry.SCHEMES, terms.scheme)
        context = BindContext(
            side="sender",
            model_id=terms.model_id,
            capabilities=scheme.capabilities,
            strategy=terms.strategy,
            cast=cast,
        )
        self._backend = bind(scheme, context)
        #: The scheme, if it wraps another.
        self.wrapping: WrappingScheme | None = None
        if isinstance(self._backend.object, WrappingScheme):
            self.wrapping = self._backend.object
            adopted = [id(layer) for layer in self.wrapping.adopt(terms.layers)]
            found = [pair for pair in found if id(pair[0]) not in adopted]
        if terms.zero_copy and "zero_copy" not in self._backend.capabilities:
            raise OptionError(f"{self._backend.describe()} cannot zero_copy; leave that out")
        self._plan = LayerPlan(found, context)
        #: The layers that are called with every report.
        self.reporters = self._plan.reporters
        #: Whether workers may get less than the whole model.
        self.leaves_out = self._plan.partial
        #: Those of the scheme.
        self.capabilities = self._backend.capabilities
        if "joined" in self.capabilities and self.leaves_out:
            raise OptionError(
                f"{self._backend.describe()} sends whole versions, since senders might leave out "
                "different tensors; make a sender of the tensors that change: Sender(scheme, "
                "{name: tensor, …}, model_id='adapter'), or gather the model one tensor after the "
                "other: Sender('shm', gathered(model), layers=…)"
            )
        if terms.zero_copy and self.leaves_out:
            raise OptionError(
                "zero_copy needs whole updates; leave it out, or the layer that sends some tensors"
            )
        # A transport that compares versions leaves out what each worker has.
        self._compares = "compares" in self._backend.capabilities
        self._defaults = Defaults(terms.strategy)
        # Those that need values at version 0, up to the last, where that had none.
        self._without_values: Sequence[Plugin] = ()
        self.stack = PluginStack(self._defaults, self._backend, self._plan.layers)
        #: Whether a plugin changes updates, and whether one may hold workers back.
        self.prepares = self.stack.calls_plugins("prepare_weights")
        self.skips = self.stack.implements("skip_update")
        #: The name of the scheme.
        self.scheme = self._backend.name
        self.transport: SenderTransport | None = None
        self._agreed: Layout | None = None
        #: Makes an address from a worker's id and its endpoint, once the transport is open.
        self.make_address: Callable[..., Address]
        self._context: TransportContext
        self._close: Callable[[], Any] | None = None

    @property
    def adapt(self) -> Callable[[Any], Any] | None:
        """Return what makes of weights what is read; None where they are read themselves."""
        wrapping = self.wrapping
        return None if wrapping is None else partial(wrapping.adapt, strategy=self._terms.strategy)

    @property
    def takes_worker_paths(self) -> bool:
        """Return whether handles of workers may be paths in the sender's context."""
        return "worker_paths" in self._backend.capabilities

    @property
    def agreed(self) -> Layout | None:
        """Return the layout that all weights must fit; None while the transport is not open."""
        return None if self.transport is None else self._agreed

    def open(
        self,
        update: Update,
        model: Any,
        found: Any,
        workers: Sequence[Any],
        members: Membership,
    ) -> None:
        """Make the transport, now that it is known what will travel; once.

        Args:
            update: the first weights.
            model: what the user gave them as.
            found: what they were read from; see `Source.found`.
            workers: handles, for a scheme that calls workers.
            members: the workers.
        """
        if self.transport is not None:
            return
        terms, source = self._terms, update.source
        context = SendContext(
            model_id=terms.model_id,
            version=0,
            worker_ids=(),
            model=found,
            stand_ins=isinstance(source, TensorStream),
        )
        if isinstance(source, TensorStream):
            # The tensors are made for the first send, by all ranks.
            source = source.stand_ins()
            self._without_values = self._plan.from_start
        first = Update(update.layout, source)
        layers = self._plan.layers
        layouts = layouts_before(self._defaults, self._backend, layers, first, context)
        # No method: the transport keeps it, and must not keep its sender alive.
        scheme = terms.scheme
        if isinstance(scheme, WrappingScheme):
            scheme = scheme.for_receivers()
        staying = len(layers) - len(self._plan.travelling)
        self.make_address = terms.address_maker(
            scheme=scheme,
            layers=self._plan.travelling,
            layouts=tuple(layouts[staying:-1]),
            layout=layouts[staying],
            source_layout=update.layout,
        )
        transport_context = TransportContext(
            side="sender",
            scheme=self.scheme,
            model_id=terms.model_id,
            token=terms.token,
            secret=terms.secret,
            timeout=terms.timeout,
            zero_copy=terms.zero_copy,
            options=terms.options,
            layers=tuple(terms.layers),
            models=names_of(model),
            worker_ids=members.ids,
            workers=tuple(workers),
            layout=layouts[-1],
            make_address=self.make_address,
            notify=members.notify,
        )
        with closed_if_it_fails():
            transport = self.stack.create_sender_transport(transport_context)
            # It must not keep the sender alive.
            self._context = replace(transport_context, make_address=None, notify=unheard)
            self._close = release_with(self, transport.close)
            self._agreed = update.layout
            self.transport = transport

    def address(self, worker_id: int) -> Address:
        """The address of a worker.

        Raises:
            ModelError: it is not known yet what will travel.
        """
        endpoint = self.opened.address(worker_id)
        return self.make_address(worker_id=worker_id, endpoint=endpoint)

    def side_channel(self, layout: Layout, places: int) -> SenderTransport:
        """Make one more transport of the innermost scheme.

        Raises:
            OptionError: the scheme cannot serve workers that come later.
            ModelError: it is not known yet what will travel.
        """
        from sync_core.sending.side_channel import SideChannel

        self.opened  # noqa: B018 - raises
        return SideChannel(self._backend, self._context, layout, places)

    def prepare(
        self,
        update: Update,
        version: int,
        worker_ids: tuple[int, ...],
        source: Source,
        acknowledged: Callable[[], Mapping[int, int]],
        *,
        by_hand: bool,
        skipped: bool,
    ) -> Update:
        """The update as the layers make it.

        Args:
            update: what was read from ``source``.
            version: the version that carries it.
            worker_ids: the workers that get it.
            source: the sender's weights.
            acknowledged: returns the version that each of these workers has.
            by_hand: see `SendContext`, here and below.
            skipped: see there.
        """
        context = SendContext(
            model_id=self._terms.model_id,
            version=version,
            worker_ids=worker_ids,
            model=source.found,
            acknowledged={} if self._compares else acknowledged(),
            own=source.own_tensors if source.by_hand else None,
            by_hand=by_hand,
            skipped=skipped,
        )
        if self._without_values:
            if skipped:
                return update
            self._prepare_values(update, replace(context, version=0))
        prepared = self.stack.prepare_weights(update, context)
        if prepared is not update:
            # A layer has made another.
            prepared.extras = {**update.extras, **prepared.extras}
        return prepared

    def _prepare_values(self, update: Update, context: SendContext) -> None:
        """Prepare version 0 once more, for the layers that need values there."""
        assert self._agreed is not None
        if lacking := self._agreed.index.keys() - update.layout.index.keys():
            raise ModelError(
                f"the first send must have all tensors, and lacks {min(lacking)!r}: layers prove "
                "by it what workers have from the start; send the whole model first"
            )
        stack = PluginStack(self._defaults, self._backend, self._without_values)
        stack.prepare_weights(Update(update.layout, update.source), context)
        self._without_values = ()

    def send(self, payload: Payload, worker_ids: tuple[int, ...]) -> dict[int, Delivery]:
        """Hand a version to the transport.

        Where the transport raises something else than a `SyncError`, every delivery has failed;
        without workers, that is raised.
        """
        transport = self.transport or self.opened
        try:
            return dict(transport.send(payload, worker_ids))
        except SyncError:
            raise
        except Exception as error:
            if not worker_ids:
                raise  # there is no delivery that could fail
            return self._undelivered(payload, worker_ids, error)

    def close(self) -> None:
        """Close the transport, if there is one."""
        if self._close is not None:
            self._close()

    def _undelivered(
        self, payload: Payload, worker_ids: tuple[int, ...], cause: Exception
    ) -> dict[int, Delivery]:
        message = f"{self._backend.describe()} could not send version {payload.version}: {cause!r}"
        deliveries = {}
        for worker_id in worker_ids:
            deliveries[worker_id] = Delivery(worker_id, payload.version, payload.nbytes)
            error = TransportError(worker_id, message)
            error.__cause__ = cause
            deliveries[worker_id].fail(error)
        return deliveries

    @property
    def opened(self) -> SenderTransport:
        """The transport.

        Raises:
            ModelError: it is not known yet what will travel.
        """
        if self.transport is None:
            raise ModelError("the sender has no model; give it one, or call register_model()")
        return self.transport
