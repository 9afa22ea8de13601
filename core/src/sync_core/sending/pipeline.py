"""A sender's source of weights, its layers and transport, and the terms of both ends."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

from torch import Tensor, nn

from sync_core import registry
from sync_core._util import release_with
from sync_core.address import Address
from sync_core.checks import check_layers
from sync_core.errors import ModelError, OptionError, SyncError, TransportError
from sync_core.hooks import (
    HOOKS,
    BindContext,
    SendContext,
    TransportContext,
    implemented,
    worker_token,
)
from sync_core.layers import (
    bind,
    declares,
    in_order,
    layouts_before,
    travels,
    with_followers,
)
from sync_core.models.binding import Binding
from sync_core.models.extract import ComputedWeights, Strategy, check_strategy, named_tensors
from sync_core.models.finder import KnownLayout, check_memory, travelling
from sync_core.models.lookup import look_up, names_of, refers, same
from sync_core.models.match import conform
from sync_core.models.registered import check_registered
from sync_core.registry import Plugin
from sync_core.report import Reporter
from sync_core.sending.membership import Membership
from sync_core.stack import Defaults, PluginStack
from sync_core.transports.transport import (
    Delivery,
    SenderTransport,
    closed_if_it_fails,
    unheard,
)
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Payload, Update
from sync_core.weights.streamed import TensorStream
from sync_core.wrapping import WrappingScheme


class Source:
    """The source of a sender's weights.

    Args:
        context: the object in which string references are looked up.
        strategy: how a module is read.
        partial: whether weights given by hand may lack some of the model's tensors.
        adapt: returns what is read in place of weights: the same object, or tensors by name.
        allowed: what modules may train without registering it; see `check_registered`. None for
            all, where workers act with the same objects.
    """

    def __init__(
        self,
        context: Any,
        strategy: Strategy,
        *,
        partial: bool,
        adapt: Callable[[Any], Any] | None = None,
        allowed: Sequence[Any] | None = None,
    ) -> None:
        self.model: Any = None
        #: The object from which weights were read last; None for tensors given by hand.
        self.found: Any = None
        #: Whether the weights read last were given in place of the model's.
        self.by_hand = False
        self._context = context
        self._strategy = strategy
        self._partial = partial
        self._adapt = adapt
        self._own: Binding | None = None
        self._given: Binding | None = None
        self._known: KnownLayout | None = None
        self._allowed = allowed
        # Already checked for tensors that are not registered: the model, and the last weights.
        self._registered: dict[bool, Any] = {}

    def read(self, weights: Any, agreed: Layout | None) -> Update:
        """The weights given, or else the model's, as an update that aliases them.

        Args:
            weights: what is read; None for the model.
            agreed: the layout that they must fit; None before one was agreed.

        Raises:
            ModelError: there are none, or they cannot travel, or have to and the scheme moves
                nothing.
            ModelPathError: a string reference leads nowhere.
            LayoutMismatchError: a name, dtype or shape differs from the layout.
        """
        self.by_hand = not (weights is None or self.model is None or weights is self.model)
        own = self._own
        if weights is None and own is not None and own.model is self.model:
            # The same object as before: neither a reference, nor several models.
            self.found = self.model
            update = own.read()
        else:
            update = self._read(self.model if weights is None else weights)
        if agreed is None:
            if not update.layout.specs:
                raise ModelError("the weights hold no tensors, so there is nothing to send")
            # As in a state_dict under DeepSpeed ZeRO-3. A shard may be empty in other shapes.
            shapes = [spec.shape for spec in update.layout.specs]
            if len(shapes) > 1 and set(shapes) == {(0,)}:
                raise ModelError(
                    "the weights hold no elements, so there is nothing to send; gather a model "
                    "that is partitioned: with deepspeed.zero.GatheredParameters("
                    "list(model.parameters())): sender.send()"
                )
        elif update.layout is not agreed:
            if update.layout == agreed:
                update = Update(agreed, update.source)
            else:
                is_own = weights is None or weights is self.model
                # Workers do not hold a tensor that the model has lost as the model does.
                partial = self._partial and not (is_own and self.found is self.model)
                update = conform(dict(update.items()), agreed, partial=partial, own=is_own)
        return update

    def own_tensors(self) -> Mapping[str, Tensor]:
        """The registered model's tensors by name; none without a registered model."""
        return {} if self.model is None else dict(self._read(self.model).items())

    def _read(self, weights: Any) -> Update:
        own = weights is self.model
        if weights is None:
            raise ModelError("nothing to send: give weights, or register a model")
        if refers(weights):
            if self._context is None:
                raise ModelError(f"{weights!r} is looked up in a context: Sender(…, context=…)")
            weights = look_up(weights, self._context)
        self.found = weights if own or _holds_modules(weights) else None
        if isinstance(weights, ComputedWeights):
            self.found = weights.model
        update = self._read_found(weights, own=own)
        if not (self._allowed is None or same(self.found, self._registered.get(own))):
            check_registered(weights, self._strategy, self._allowed)
            self._registered[own] = self.found
        return update

    def _read_found(self, weights: Any, *, own: bool) -> Update:
        if isinstance(weights, ComputedWeights):
            return self._computed(weights.read(self._strategy))
        if self._adapt is not None and (adapted := self._adapt(weights)) is not weights:
            return self._lay_out(adapted)
        if own:
            self._own = _bound(self._own, weights, self._strategy)
            return self._own.read()
        if self.found is not None:
            self._given = _bound(self._given, weights, self._strategy)
            return self._given.read()
        return self._lay_out(named_tensors(weights, self._strategy))

    def _computed(self, made: Mapping[str, Tensor] | TensorStream) -> Update:
        if not isinstance(made, TensorStream):
            named = dict(made)
            return self._lay_out(named if self._adapt is None else self._adapt(named))
        update = Update(made.layout, made)
        if self._adapt is None:
            return update
        # By name, so that a scheme which takes all of them reads the stream.
        by_name = NamedStream(update)
        adapted = self._adapt(by_name)
        return update if adapted is by_name else self._lay_out(dict(adapted))

    def _lay_out(self, named: dict[str, Tensor]) -> Update:
        if self._known is None or not self._known.fits(named):
            self._known = KnownLayout(named)
        check_memory(named)
        return Update(self._known.layout, travelling(self._known.layout, named))


class NamedStream(Mapping[str, Tensor]):
    """The tensors of a stream by name; the first that is read has all of them made."""

    def __init__(self, update: Update) -> None:
        self._update = update

    def __getitem__(self, name: str) -> Tensor:
        return self._update.tensors[self._update.layout.index[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._update.layout.names)

    def __len__(self) -> int:
        return len(self._update.layout.names)


def _up_to(capability: str, layers: Sequence[Plugin]) -> Sequence[Plugin]:
    """Return the layers up to the last that declares a capability."""
    found = [i for i, layer in enumerate(layers, 1) if declares(capability, [layer])]
    return layers[: max(found, default=0)]


def _holds_modules(weights: Any) -> bool:
    if isinstance(weights, nn.Module):
        return True
    return isinstance(weights, Mapping) and any(
        isinstance(value, nn.Module) for value in weights.values()
    )


def _bound(binding: Binding | None, model: Any, strategy: Strategy) -> Binding:
    if binding is not None and same(binding.model, model):
        return binding
    return Binding(model, strategy)


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

    def context(self, scheme: str, **known: Any) -> TransportContext:
        """Return the context of the sender's transport; ``known`` are the fields not agreed on."""
        return TransportContext(
            side="sender",
            scheme=scheme,
            model_id=self.model_id,
            token=self.token,
            secret=self.secret,
            timeout=self.timeout,
            zero_copy=self.zero_copy,
            options=self.options,
            **known,
        )


class Pipeline:
    """Layers change an update here, and the transport takes it away.

    Args:
        terms: what the sender was asked for.

    Raises:
        PluginError: the scheme or a layer cannot be found or used.
        OptionError: the scheme cannot do what is asked of it.
    """

    def __init__(self, terms: Terms) -> None:
        given, found = with_followers(terms.layers)
        cast = declares("cast", found)
        self._terms = replace(terms, cast=cast)
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
        self._given = tuple(terms.layers)
        if isinstance(self._backend.object, WrappingScheme):
            self.wrapping = self._backend.object
            adopted = [id(layer) for layer in self.wrapping.adopt(terms.layers)]
            kept = [id(each) not in adopted for each in given]
            given, found = tuple(compress(given, kept)), tuple(compress(found, kept))
        if terms.zero_copy and "zero_copy" not in self._backend.capabilities:
            raise OptionError(f"{self._backend.describe()} cannot zero_copy; leave that out")
        #: The layers that are called with every report.
        self.reporters = [one.object for one in found if isinstance(one.object, Reporter)]
        # A reporter without hooks is nothing to a stack.
        layers = [
            bind(layer, context) for layer in found if set(HOOKS) & {*implemented(layer.object)}
        ]
        # The layers that receivers need, as the user gave them, and as they are used here.
        self._travelling = tuple(compress(given, map(travels, found)))
        self._undone = tuple(filter(travels, layers))
        #: Whether workers may get less than the whole model.
        self.leaves_out = declares("partial", layers)
        #: Those of the scheme.
        self.capabilities = self._backend.capabilities
        # Whether a receiver needs the addresses of other senders, too.
        self._joined = "joined" in self.capabilities
        if self._joined and self.leaves_out:
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
        self._layers = in_order(layers)
        # Those that need values at version 0, up to the last, where that had none.
        self._without_values: Sequence[Plugin] = ()
        self.stack = PluginStack(self._defaults, self._backend, self._layers)
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
        source = update.source
        context = SendContext(
            model_id=self._terms.model_id,
            version=0,
            worker_ids=(),
            model=found,
            stand_ins=isinstance(source, TensorStream),
        )
        if isinstance(source, TensorStream):
            # The tensors are made for the first send, by all ranks.
            source = source.stand_ins()
            self._without_values = _up_to("from_start", self._layers)
        first = Update(update.layout, source)
        layouts = layouts_before(self._defaults, self._backend, self._layers, first, context)
        given = {id(layer): layout for layer, layout in zip(self._layers, layouts, strict=False)}
        undone = [*map(travels, self._layers), True]
        # No method: the transport keeps it, and must not keep its sender alive.
        scheme = self._terms.scheme
        if isinstance(scheme, WrappingScheme):
            scheme = scheme.for_receivers()
        self.make_address = self._terms.address_maker(
            scheme=scheme,
            layers=self._travelling,
            layouts=tuple(given[id(layer)] for layer in self._undone),
            layout=next(compress(layouts, undone)),
            source_layout=update.layout,
        )
        transport_context = self._terms.context(
            self._backend.name,
            layers=self._given,
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
