"""The wrapping scheme of sharded trainers, and the joined addresses of their ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from sync_core import (
    Address,
    BindContext,
    Layout,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
)
from sync_core.checks import check_count, check_integer
from sync_core.errors import AddressError, ModelError, OptionError
from sync_core.hooks import implemented
from sync_core.models import Strategy
from sync_core.registry import LAYERS, Plugin, find
from sync_core.wrapping import WrappingScheme
from sync_plugin_scale.shards.endpoint import HeldTensor, Holding, RankEndpoint, ShardEndpoint
from sync_plugin_scale.shards.local import LocalShards, Regions
from sync_plugin_scale.shards.plan import shape_of
from sync_plugin_scale.shards.whole_model import WholeModel, chained

# Of the addresses of one trainer and one worker these are equal.
_EQUAL = ("worker_id", "model_id", "strategy", "timeout", "cast")


@dataclass(frozen=True)
class Sharded(WrappingScheme):
    """A scheme for one rank of a sharded trainer, which sends the parts that it holds.

    Each rank makes a sender; `send` has no collective. Each worker takes what it needs of all
    ranks, from the address that `join_addresses` makes. Modules are read by their `state_dict`.

    A scheme that publishes for readers which the trainer does not know, such as ``store``, has the
    method ``create_rank(context, holding)``. Without ``num_workers``, all ranks then write each
    version together; `Sender.address` of any rank is the address of all readers.

    Args:
        inner: the scheme that carries the parts.
        rank: the rank of this process.
        size: the number of ranks.
        regions: of plain tensors of which this rank has only a part, by name, which part: for each
            dimension of the whole tensor ``(start, stop)``, or ``(start, stop, size)``, as layers
            that rename, fuse or split tensors need.

    Raises:
        OptionError: the rank is not one of ``0 … size - 1``.

    Example:
        >>> Sharded("dist", 1, 4).name
        'sharded::dist'
        >>> Sharded("dist", 4, 4)
        Traceback (most recent call last):
        ...
        sync_core.errors.OptionError: rank is 4; of 4 ranks, give 0 to 3
    """

    wrapper: ClassVar[str] = "sharded"
    keeps: ClassVar[frozenset[str]] = frozenset(
        {"background", "broadcast", "compares", "cross_host", "cross_process", "descriptors"}
        | {"late_join", "publishes", "pull"}
    )
    adds: ClassVar[frozenset[str]] = frozenset({"joined"})

    rank: int
    size: int
    regions: Regions | None = None

    def __post_init__(self) -> None:
        try:
            check_count(self.size, "size")
            check_integer(self.rank, "rank", f"give 0 to {self.size - 1}")
        except (TypeError, ValueError) as error:
            raise OptionError(str(error)) from None
        if not 0 <= self.rank < self.size:
            raise OptionError(
                f"rank is {self.rank}; of {self.size} ranks, give 0 to {self.size - 1}"
            )

    @cached_property
    def plugin(self) -> Plugin:
        """The inner scheme.

        Raises:
            PluginError: it cannot be found or used.
            OptionError: each rank would decide alone about its part.
        """
        found = super().plugin
        if "all_or_none" in found.capabilities:
            raise OptionError(
                f"{self.wrapper}::{found.name} would let each rank decide alone; a worker commits "
                "what all ranks have sent, whatever other workers do: type "
                f"Sharded({found.object.inner!r}, rank, size)"
            )
        return found

    @property
    def capabilities(self) -> frozenset[str]:
        """The inner scheme's that are kept; ``publishes`` only where it has ``create_rank``."""
        found = super().capabilities
        return found if self._create_rank is not None else found - {"publishes"}

    @property
    def _create_rank(self) -> Callable[[TransportContext, Holding], SenderTransport | None] | None:
        found: Any = getattr(self.plugin.object, "create_rank", None)
        return found if "publishes" in self.plugin.capabilities else None

    @cached_property
    def _shards(self) -> LocalShards:
        """Reads the model of one sender; see `bind`."""
        return LocalShards(self.regions)

    def bind(self, context: BindContext) -> Self:
        """Return a copy for one sender, which remembers where its shards lie."""
        del context
        return replace(self)

    def for_receivers(self) -> Self:
        """Return the scheme without the trainer's regions."""
        return replace(self, regions=None)

    def adopt(self, layers: Sequence[Any]) -> Sequence[Any]:
        """Return the layers that regroup tensors, and those that prove what travels."""
        return [layer for layer in layers if _declared(layer) & {"regions", "checksums"}]

    def adapt(self, weights: Any, strategy: Strategy) -> Any:
        """Return the tensors that this rank holds."""
        return self._shards.read(weights, strategy)

    def resolve(self, address: Address, model: Any, timeout: float) -> tuple[Address, Any]:
        """Plan what is taken from each rank."""
        from sync_plugin_scale.shards.receiver import join, refuse

        endpoint = address.endpoint
        if not isinstance(endpoint, ShardEndpoint) and self._create_rank is not None:
            return self._resolve_published(address, model, timeout)
        if not isinstance(endpoint, ShardEndpoint):
            raise AddressError(
                f"the endpoint of an address of {self.name} must be a ShardEndpoint, got a "
                f"{type(endpoint).__name__}; type join_addresses([…])"
            )
        if not endpoint.complete:
            raise AddressError(
                f"this is the address of rank {self.rank} of {self.size}; join it with those of "
                "the other ranks: Receiver(join_addresses([…]), model)"
            )
        try:
            return join(address, model)
        except Exception as error:
            refuse(address, self, error, timeout)
            raise

    def _resolve_published(
        self, address: Address, model: Any, timeout: float
    ) -> tuple[Address, Any]:
        """Let the inner scheme find out what all ranks publish: the layout is one rank's."""
        unknown = Layout(())
        address = replace(address, scheme=self.inner, layout=unknown, source_layout=unknown)
        resolve = getattr(self.plugin.object, "resolve", None)
        if resolve is None:
            raise OptionError(
                f"{self.plugin.describe()} has create_rank() and no resolve(), by which a reader "
                "finds out what the ranks publish; add that to the scheme"
            )
        resolved: tuple[Address, Any] = resolve(address, model, timeout)
        return resolved

    def inner_rank(
        self, context: TransportContext, rank: RankEndpoint, **changed: Any
    ) -> ReceiverTransport:
        """Make the receiver's side of the inner scheme that connects to one rank."""
        if rank.token:
            changed |= {"token": rank.sender_token, "secret": rank.token}
        return self.inner_receiver(
            context,
            options=context.options if rank.options is None else rank.options,
            endpoint=rank.inner,
            **changed,
        )

    def endpoint_to_json(self, endpoint: Any) -> Any:
        """Return what the ranks hold, and their endpoints, as plain values."""
        if not isinstance(endpoint, ShardEndpoint):
            return super().endpoint_to_json(endpoint)
        return endpoint.to_json(super().endpoint_to_json)

    def endpoint_from_json(self, value: Any) -> Any:
        """Return the endpoint that `endpoint_to_json` wrote."""
        if isinstance(value, dict) and self._create_rank is not None:
            return super().endpoint_from_json(value)
        endpoint = ShardEndpoint.from_json(value, super().endpoint_from_json)
        if endpoint.ranks[0].holding.size != self.size:
            raise AddressError(f"the endpoint of an address of {self.name} has other ranks")
        return endpoint

    def create_sender(self, context: TransportContext) -> SenderTransport:
        """Make the sender's side."""
        from sync_plugin_scale.shards.sender import ShardedSender

        if context.workers:
            raise OptionError(
                f"{self.name} needs workers that connect by addresses; type num_workers=… instead "
                "of workers="
            )
        if not self._shards.places:
            raise OptionError(
                "Sharded reads the model of its rank, so it has to be the outermost scheme; type "
                "Sharded('increments::dist', rank, size)"
            )
        assert context.layout is not None
        holding = self._holding(context.layout, context.layers)
        create_rank = self._create_rank
        if create_rank is not None and not context.worker_ids:
            found = create_rank(replace(context, scheme=self.plugin.name), holding)
            if found is not None:
                return found
        return ShardedSender(context, self, holding)

    def create_receiver(self, context: TransportContext) -> ReceiverTransport:
        """Make a receiver's side, which runs in the thread that commits."""
        from sync_plugin_scale.shards.receiver import JoinedReceiver, JoinPlan

        if not isinstance(context.endpoint, JoinPlan):
            raise AddressError(
                "Sharded has to be the outermost scheme; type Sharded('increments::dist', rank, "
                "size)"
            )
        return JoinedReceiver(context, self, context.endpoint)

    def _holding(self, layout: Layout, layers: Sequence[Any]) -> Holding:
        """Return what this rank holds, as the layers have changed it."""
        held = []
        for spec in layout.specs:
            region, shape = self._shards.places.get(spec.name, (None, None))
            if region is None or shape_of(region) != spec.shape:
                raise ModelError(
                    f"{_reshaping(layers)} changes names or shapes, and has made {spec}; on a rank "
                    "of a sharded trainer, layers may change dtypes and values, and rename, fuse "
                    "or split tensors; leave it out of layers=, or type Sender('shm', "
                    "gathered(model), layers=…), which gathers the model"
                )
            held.append(HeldTensor(spec.name, spec.dtype, region, shape))
        made_of = None
        regrouping = [find(LAYERS, each).object for each in layers if "regions" in _declared(each)]
        if regrouping:
            for tensor in held:
                if tensor.shape is None:
                    raise OptionError(
                        f"the shape of the whole tensor {tensor.name!r} is not known on this rank, "
                        "and layers that rename, fuse or split need it; give its regions as "
                        "(start, stop, size)"
                    )
            kinds = [(tensor.name, tensor.dtype, tensor.shape or ()) for tensor in held]
            made_of = chained(regrouping, Layout(Layout.of_kinds(kinds).specs, layout.aliases))
        verified = any("checksums" in _declared(layer) for layer in layers)
        return Holding(self.rank, self.size, tuple(held), layout.aliases, made_of, verified)


def _declared(layer: Any) -> frozenset[str]:
    """Return the capabilities of a layer, which need not declare any."""
    found: frozenset[str] = getattr(find(LAYERS, layer).object, "capabilities", frozenset())
    return found


def _reshaping(layers: Sequence[Any]) -> str:
    """Name the layers that may have changed names or shapes: those that do more than cast."""
    found = [find(LAYERS, layer) for layer in layers if not _declared(layer) & {"regions"}]
    changing = [p for p in found if "prepare_weights" in implemented(p.object)]
    suspects = [
        p for p in changing if "cast" not in getattr(p.object, "capabilities", ())
    ] or changing
    return " or ".join(plugin.describe() for plugin in suspects)


def join_addresses(addresses: Sequence[Address]) -> Address:
    """The address of one worker from those that all ranks have for it.

    It pickles, and has a JSON form where those of the ranks have one.

    Args:
        addresses: what ``sender.address(worker_id)`` gave on each rank, in any order.

    Raises:
        AddressError: a rank is missing or there twice, or the addresses are for different workers
            or of different trainers.
        LayoutMismatchError: the ranks do not agree on the dtype or the shape of a tensor.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender
        >>> halves = [torch.zeros(2, 3), torch.ones(2, 3)]
        >>> regions = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
        >>> senders = [
        ...     Sender(Sharded("thread", rank, 2, regions={"weight": regions[rank]}),
        ...            {"weight": half}, num_workers=1)
        ...     for rank, half in enumerate(halves)]
        >>> address = join_addresses([sender.address(0) for sender in senders])
        >>> model = {"weight": torch.full((4, 3), 7.0)}
        >>> receiver = Receiver(address, model)
        >>> pending = [sender.send_async() for sender in senders]
        >>> receiver.receive(), model["weight"][:, 0]
        (1, tensor([0., 0., 1., 1.]))
        >>> [each.wait().updated for each in pending]
        [(0,), (0,)]
        >>> for sender in senders: sender.close()
    """
    addresses = tuple(addresses)
    if not addresses:
        raise AddressError("join_addresses() needs the addresses of all ranks, got none")
    for address in addresses:
        endpoint = address.endpoint if isinstance(address, Address) else None
        scheme = address.scheme if isinstance(address, Address) else None
        if isinstance(scheme, Sharded) and not isinstance(endpoint, ShardEndpoint):
            raise AddressError(
                f"the ranks publish together, as {scheme.name} was given no workers, and the "
                "address of any of them is that of all readers; type "
                "Receiver(sender.address(), model)"
            )
        if not isinstance(endpoint, ShardEndpoint) or endpoint.ranks[0].token:
            raise AddressError(
                f"{address!r:.200} is not the address of a rank; type Sender(Sharded(scheme, rank, "
                "size), …) on every rank, and join what sender.address(worker_id) gives there"
            )
    addresses = tuple(sorted(addresses, key=_rank))
    _check_ranks(addresses)
    first, *others = addresses
    ours = _agreed(first)
    for address in others:
        for name, theirs in _agreed(address).items():
            if theirs != ours[name]:
                raise AddressError(
                    f"the addresses of ranks {_rank(first)} and {_rank(address)} differ in "
                    f"{name}: {ours[name]!r} and {theirs!r}; join those of one trainer and one "
                    "worker"
                )
    ranks = tuple(
        replace(
            each.endpoint.ranks[0],
            token=each.token,
            sender_token=each.sender_token,
            options=each.options,
        )
        for each in addresses
    )
    model = WholeModel([rank.holding for rank in ranks])
    tokens = "".join(rank.token for rank in ranks)
    return replace(
        first,
        options={},
        endpoint=ShardEndpoint(ranks),
        # No sender knows it: each rank has its own.
        token=hashlib.sha256(tokens.encode()).hexdigest()[:32],
        sender_token="",
        layout=model.layout,
        source_layout=model.layout,
    )


def _agreed(address: Address) -> dict[str, Any]:
    checksums = address.endpoint.ranks[0].holding.verified
    return {**{name: getattr(address, name) for name in _EQUAL}, "checksums": checksums}


def _rank(address: Address) -> int:
    rank: int = address.endpoint.ranks[0].holding.rank
    return rank


def _check_ranks(addresses: Sequence[Address]) -> None:
    sizes = {address.endpoint.ranks[0].holding.size for address in addresses}
    ranks = [_rank(address) for address in addresses]
    if len(sizes) > 1:
        raise AddressError(f"the addresses are of trainers with {sorted(sizes)} ranks; join one's")
    expected = list(range(sizes.pop()))
    if ranks != expected:
        missing = sorted(set(expected) - set(ranks))
        what = f"there is none of rank {missing[0]}" if missing else "a rank is there twice"
        raise AddressError(f"addresses of ranks {ranks} do not join, as {what}")
