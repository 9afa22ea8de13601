"""Schemes whose transports are made of another scheme's: `WrappingScheme`.

A chain such as ``"increments::dist"`` names them from the outside in: versions are packed by
``increments``, and what it packs is moved by ``dist``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sync_core import hooks
from sync_core.checks import parse_options
from sync_core.errors import AddressError, HookResultError, OptionError
from sync_core.hooks import (
    BindContext,
    HookManager,
    TransportContext,
    check_endpoint,
    hookimpl,
)
from sync_core.registry import SEPARATOR, OuterScheme, Plugin
from sync_core.transports.transport import Answer, Delivery, ReceiverTransport, SenderTransport

if TYPE_CHECKING:
    from sync_core.models.extract import Strategy
    from sync_core.weights.payload import Payload

__all__ = [
    "SEPARATOR",
    "WrappingReceiver",
    "WrappingScheme",
    "WrappingSender",
    "end_together",
    "make_receiver",
    "make_sender",
]


@dataclass(frozen=True)
class WrappingScheme(OuterScheme):
    """A scheme whose transports are made of another scheme's; subclass it as a frozen dataclass.

    The fields of the subclass are its options, and have defaults: a chain of names uses those.
    Plain values (numbers, strings, None) give the scheme's addresses a JSON form. The options of a
    sender, ``Sender(…, **options)``, are those of the innermost scheme.

    Args:
        inner: the scheme that moves what this one makes: a name, a chain, or a plugin object.

    Attributes:
        wrapper: the name of its entry point in the group ``sync.schemes``.
        keeps: those of the inner scheme's capabilities that this one keeps.
        adds: capabilities that it has whatever the inner scheme has.

    Example:
        >>> from dataclasses import dataclass
        >>> from typing import ClassVar
        >>> @dataclass(frozen=True)
        ... class Counted(WrappingScheme):
        ...     wrapper: ClassVar[str] = "counted"
        ...     keeps: ClassVar[frozenset[str]] = frozenset({"cross_process", "late_join"})
        ...     limit: int = 10
        ...     def create_sender(self, context):
        ...         return self.inner_sender(context)
        ...     def create_receiver(self, context):
        ...         return self.inner_receiver(context)
        >>> Counted("shm").name, sorted(Counted("shm").capabilities)
        ('counted::shm', ['cross_process', 'late_join'])
    """

    keeps: ClassVar[frozenset[str]] = frozenset()
    adds: ClassVar[frozenset[str]] = frozenset()

    @property
    def capabilities(self) -> frozenset[str]:
        """Return the capabilities of the inner scheme that are kept, and those that are added."""
        return (self.plugin.capabilities & self.keeps) | self.adds

    @abstractmethod
    def create_sender(self, context: TransportContext) -> SenderTransport:
        """Make the sender's side; see `inner_sender`."""

    @abstractmethod
    def create_receiver(self, context: TransportContext) -> ReceiverTransport:
        """Make a receiver's side; see `inner_receiver`."""

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """Make one side."""
        if context.side == "sender":
            return self.create_sender(context)
        return self.create_receiver(context)

    def inner_sender(self, context: TransportContext, **changed: Any) -> SenderTransport:
        """Make the sender's side of the inner scheme.

        Args:
            context: what `create_sender` was given.
            changed: the fields in which the inner scheme's context differs, such as ``layout``;
                ``make_address=None`` where addresses have another endpoint than the inner scheme's.
        """
        return make_sender(self.plugin, replace(context, **changed))

    def inner_receiver(self, context: TransportContext, **changed: Any) -> ReceiverTransport:
        """Make a receiver's side of the inner scheme.

        Where the receiver stages in the background, the innermost scheme's transport does: a
        wrapping transport runs in the thread that commits, and may reuse its memory after that.

        Args:
            context: what `create_receiver` was given.
            changed: the fields in which the inner scheme's context differs, such as ``endpoint``.
        """
        return make_receiver(self.plugin, replace(context, **changed))

    def bind(self, context: BindContext) -> Self:
        """Return the scheme for one sender; by default this one.

        A scheme that remembers something of a sender's model returns a copy of itself.
        """
        del context
        return self

    def for_receivers(self) -> Self:
        """Return the scheme for addresses: without what only the sender needs; by default all."""
        return self

    def adopt(self, layers: Sequence[Any]) -> Sequence[Any]:
        """Return those of a sender's layers that the transports apply themselves; by default none.

        The sender does not call them. `create_sender` finds all layers in ``context.layers``.

        Args:
            layers: names and objects of layers, as the user gave them.
        """
        del layers
        return ()

    def adapt(self, weights: Any, strategy: Strategy) -> Any:
        """Return what a sender reads in place of weights; by default the same.

        Called at every send, with what a reference leads to.

        Args:
            weights: the sender's model, or what `Sender.send` was given.
            strategy: how modules are read; see `sync_core.Sender`.

        Returns:
            The same object, or the tensors by name.
        """
        del strategy
        return weights

    def resolve(self, address: Any, model: Any, timeout: float) -> tuple[Any, Any]:
        """Return what a receiver works with in place of its address and model; by default both.

        A model that is returned in another form has the method ``views_of(weights)``, by which
        weights given by hand are read.

        Args:
            address: the `Address` that the receiver was given.
            model: the receiver's model; None where it loads by a function, or has none yet.
            timeout: in seconds.
        """
        del timeout
        return address, model

    def endpoint_to_json(self, endpoint: Any) -> Any:
        """Return an endpoint of this scheme as plain values; by default one of the inner scheme."""
        return endpoint_to_json(self.plugin, endpoint)

    def endpoint_from_json(self, value: Any) -> Any:
        """Return the endpoint that `endpoint_to_json` wrote.

        Raises:
            AddressError: it is something else; without the value, which may be a secret.
        """
        return endpoint_from_json(self.plugin, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what was found: an installed plugin is found again where this is unpickled.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


def make_sender(
    plugin: Plugin, context: TransportContext, manager: HookManager | None = None
) -> SenderTransport:
    """Make the sender's side of a scheme alone, without layers.

    For objects that wrap a scheme without `WrappingScheme`, whose `inner_sender` does the same.

    Args:
        plugin: the scheme, of `sync_core.registry.find`.
        context: what the hook `create_transport` was given.
        manager: has the scheme, and calls its hooks; one with the scheme alone by default.

    Raises:
        HookResultError: the scheme made something else.
    """
    made = _create(plugin, context, manager)
    if not isinstance(made, SenderTransport):
        raise _wrong(plugin, made, "a SenderTransport for the sender")
    return made


def make_receiver(
    plugin: Plugin, context: TransportContext, manager: HookManager | None = None
) -> ReceiverTransport:
    """Make a receiver's side of a scheme alone, without layers; see `make_sender`.

    Where the context asks for it, the transport stages in its own thread, unless the scheme wraps
    another, to which it leaves that.

    Args:
        plugin: the scheme.
        context: what the hook was given.
        manager: see `make_sender`.

    Raises:
        AddressError: the endpoint is not one of the scheme's.
        HookResultError: the scheme made something else.
    """
    check_endpoint(plugin.name, plugin.object, context.endpoint)
    made = _create(plugin, context, manager)
    if not isinstance(made, ReceiverTransport):
        raise _wrong(plugin, made, "a ReceiverTransport for the receiver")
    wraps = isinstance(plugin.object, WrappingScheme)
    if not context.background or wraps or "background" not in plugin.capabilities:
        return made
    # Loads torch, for which `sync-core list` need not wait.
    from sync_core.transports.background import BackgroundReceiver

    return BackgroundReceiver(made)


def endpoint_to_json(plugin: Plugin, endpoint: Any) -> Any:
    """Return an endpoint of a scheme as plain values, where it consists of such."""
    scheme = plugin.object
    if isinstance(scheme, WrappingScheme):
        return scheme.endpoint_to_json(endpoint)
    if is_dataclass(endpoint) and type(endpoint) is getattr(scheme, "endpoint_type", None):
        return {f.name: getattr(endpoint, f.name) for f in fields(endpoint)}
    return endpoint


def endpoint_from_json(plugin: Plugin, value: Any) -> Any:
    """Return the endpoint of a scheme that `endpoint_to_json` wrote.

    Raises:
        AddressError: it is something else; without the value, which may be a secret.
    """
    scheme = plugin.object
    if isinstance(scheme, WrappingScheme):
        return scheme.endpoint_from_json(value)
    kind = getattr(scheme, "endpoint_type", None)
    if not isinstance(kind, type) or not is_dataclass(kind):
        check_endpoint(plugin.name, scheme, value)
        return value
    try:
        given = value if isinstance(value, dict) else {"": value}
        return parse_options(kind, given, f"the endpoint of scheme {plugin.name!r}")
    except OptionError:
        names = ", ".join(f"{f.name}: {f.type}" for f in fields(kind))
        raise AddressError(
            f"the endpoint of an address of scheme {plugin.name!r} must have {names}, got a "
            f"{type(value).__name__} that differs; type sender.address(worker_id).to_json()"
        ) from None


def end_together(outer: Delivery, inner: Delivery) -> None:
    """Fail the inner delivery when the outer one is given up, which ends every wait for it.

    Args:
        outer: the sender's delivery.
        inner: that of the inner transport; it fails with the outer one's error, the same object.
    """

    def end() -> None:
        if outer.error is not None and not inner.ended:
            inner.fail(outer.error)

    outer.on_end = end


def _wrong(plugin: Plugin, made: object, wanted: str) -> HookResultError:
    given = "None" if made is None else f"a {type(made).__name__}"
    return HookResultError(f"{plugin.describe()}: create_transport returned {given}, not {wanted}")


def _create(plugin: Plugin, context: TransportContext, manager: HookManager | None) -> object:
    if manager is None:
        manager = HookManager()
        manager.add_hookspecs(hooks)
        manager.register(plugin.object)
    return manager.hook.create_transport(context=replace(context, scheme=plugin.name))


class WrappingSender(SenderTransport):
    """The sender's side of a scheme that wraps another: passes every call on.

    Subclasses override what they change, such as `send`.

    Args:
        transport: the inner scheme's, of `WrappingScheme.inner_sender`; owned from now on.
    """

    def __init__(self, transport: SenderTransport) -> None:
        self.transport = transport

    def address(self, worker_id: int) -> Any:
        """Return the inner transport's endpoint."""
        return self.transport.address(worker_id)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        """Send by the inner transport."""
        return self.transport.send(payload, worker_ids)

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait by the inner transport."""
        self.transport.wait(deliveries, timeout)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        self.transport.add_worker(worker_id, worker)

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker."""
        self.transport.remove_worker(worker_id)

    def close(self) -> None:
        """Close the inner transport."""
        self.transport.close()


class WrappingReceiver(ReceiverTransport):
    """A receiver's side of a scheme that wraps another: passes every call on.

    Subclasses override what they change, such as `receive`.

    Args:
        transport: the inner scheme's, of `WrappingScheme.inner_receiver`; owned from now on.
    """

    def __init__(self, transport: ReceiverTransport) -> None:
        self.transport = transport

    def receive(self, timeout: float) -> Payload | None:
        """Receive by the inner transport."""
        return self.transport.receive(timeout)

    def acknowledge(self, answer: Answer) -> None:
        """Answer by the inner transport."""
        self.transport.acknowledge(answer)

    def delivered(self, version: int) -> int:
        """Return what the inner transport returns."""
        return self.transport.delivered(version)

    def on_arrival(self, callback: Callable[[], None]) -> bool:
        """Let the inner transport call the function."""
        return self.transport.on_arrival(callback)

    def wake(self) -> None:
        """Wake the inner transport."""
        self.transport.wake()

    def leave(self, reason: str) -> None:
        """Notify the sender."""
        self.transport.leave(reason)

    def close(self) -> None:
        """Close the inner transport."""
        self.transport.close()
