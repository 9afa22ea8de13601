"""The worker's side of sharding: one version, joined from what all ranks of a trainer send."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sync_core.address import Address, IndirectEndpoint
from sync_core.errors import (
    AddressError,
    CorruptionError,
    ModelError,
    OptionError,
    SenderLostError,
    SyncError,
)
from sync_core.hooks import TransportContext, hookimpl
from sync_core.registry import ComposedScheme
from sync_core.shards.local import Regions, RegionViews
from sync_core.shards.plan import Region, plan, shape_of, write_region
from sync_core.shards.request import Holding, Request, ShardEndpoint, broken
from sync_core.shards.sender import inner_stack
from sync_core.shards.whole_model import WholeModel, wanted_regions
from sync_core.transports.transport import Answer, ReceiverTransport, SenderTransport
from sync_core.weights.layout import ASK, SHARD_VERSION, Layout
from sync_core.weights.payload import Payload

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RankSource:
    """The part of a version that one rank sends to this worker.

    Args:
        address: the rank's address.
        request: what is asked of it.
        layout: of what it sends.
    """

    address: Address
    request: Request
    layout: Layout


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """The way in which a version is made of the payloads of all ranks.

    Args:
        sources: the ranks.
        layout: of the version: the parts that are written into the model.
        origins: for each tensor of ``layout``, the position of its source, and that of the tensor
            in the source's layout.
    """

    sources: tuple[RankSource, ...]
    layout: Layout
    origins: tuple[tuple[int, int], ...]


class JoinedScheme(ComposedScheme):
    """A scheme for receivers only, that joins what all ranks of a trainer send.

    Args:
        addresses: those of all ranks for this worker, in the order of the ranks.
        joined: how a version is made; None before it is known which regions the worker wants.
    """

    by_parts = True

    def __init__(self, addresses: Sequence[Address], joined: JoinPlan | None = None) -> None:
        self.addresses = tuple(addresses)
        self._joined = joined
        backend = self.addresses[0].scheme
        self.name = backend.name
        self.capabilities = backend.capabilities

    def __reduce__(self) -> tuple[object, tuple[tuple[Address, ...]]]:
        return JoinedScheme, (self.addresses,)

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The receiver's side; there is no other."""
        if context.side == "sender" or self._joined is None:
            raise OptionError("joined addresses are for a Receiver: Receiver(address, model)")
        return JoinedReceiver(context, self._joined)


class JoinedEndpoint(IndirectEndpoint):
    """The endpoint of joined addresses, from which the model decides what is taken."""

    takes_regions = True

    def resolve(
        self, address: Address, model: Any, regions: Any, timeout: float
    ) -> tuple[Address, RegionViews]:
        """Plan what is taken from each rank."""
        del timeout
        return join(address, model, regions)


def join_addresses(addresses: Sequence[Address]) -> Address:
    """The address of one worker from those that all ranks of a trainer have for it.

    Args:
        addresses: what ``sender.address(worker_id)`` gave on each rank, in any order.

    Raises:
        AddressError: a rank is missing or there twice, or the addresses are for different workers
            or of different trainers.
        LayoutMismatchError: the ranks do not agree on the dtype or the shape of a tensor.

    Example:
        >>> halves = [torch.zeros(2, 3), torch.ones(2, 3)]
        >>> regions = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
        >>> senders = [
        ...     Sender("thread", {"weight": half}, num_workers=1,
        ...            ranks=Ranks(rank, 2), regions={"weight": regions[rank]})
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
        if not isinstance(address, Address) or not isinstance(address.endpoint, ShardEndpoint):
            raise AddressError(
                f"{address!r:.200} is not the address of a rank; give Sender(…, ranks=Ranks(rank, "
                "size)) on every rank, and join what sender.address(worker_id) gives there"
            )
    addresses = tuple(sorted(addresses, key=lambda each: _holding(each).ranks.rank))
    first = addresses[0]
    _check_ranks(addresses)
    for address in addresses[1:]:
        for field in (
            "worker_id",
            "model_id",
            "strategy",
            "timeout",
            "cast",
            "checksums",
        ):
            theirs, ours = _agreed(address, field), _agreed(first, field)
            if theirs != ours:
                raise AddressError(
                    f"the addresses of ranks {_rank(first)} and {_rank(address)} differ in "
                    f"{field}: {ours!r} and {theirs!r}; join those of one trainer and one worker"
                )
    model = WholeModel([_holding(address) for address in addresses])
    return replace(
        first,
        scheme=JoinedScheme(addresses),
        options={},
        endpoint=JoinedEndpoint(),
        layout=model.layout,
        source_layout=model.layout,
    )


def _holding(address: Address) -> Holding:
    holding: Holding = address.endpoint.holding
    return holding


def _agreed(address: Address, field: str) -> object:
    return _holding(address).verified if field == "checksums" else getattr(address, field)


def _rank(address: Address) -> int:
    return _holding(address).ranks.rank


def _check_ranks(addresses: Sequence[Address]) -> None:
    sizes = {_holding(address).ranks.size for address in addresses}
    ranks = [_rank(address) for address in addresses]
    if len(sizes) > 1:
        raise AddressError(f"the addresses are of trainers with {sorted(sizes)} ranks; join one's")
    expected = list(range(sizes.pop()))
    if ranks != expected:
        missing = sorted(set(expected) - set(ranks))
        what = f"there is none of rank {missing[0]}" if missing else "a rank is there twice"
        raise AddressError(f"addresses of ranks {ranks} do not join, as {what}")


def join(address: Address, model: Any, regions: Regions | None) -> tuple[Address, RegionViews]:
    """Plan what a worker takes from each rank, and return what its receiver works with.

    Args:
        address: what `join_addresses` returned.
        model: a module or a mapping of tensors, distributed or plain.
        regions: of plain tensors that are part of a whole tensor, the regions.

    Returns:
        The address with the plan in it, and views of the model's tensors, one for each part.

    Raises:
        LayoutMismatchError: the model and the trainer's do not fit; both are in the message.
        ModelError: there is no model, or it cannot be read.
    """
    if model is None:
        raise ModelError("joined addresses need the model: Receiver(join_addresses([…]), model)")
    trainer = WholeModel([_holding(each) for each in address.scheme.addresses])
    wanted = wanted_regions(model, regions, trainer, cast=address.cast)
    held = {name: trainer.held(name) for name in wanted}
    parts = plan(held, wanted, destination=address.worker_id)
    requests: list[list[tuple[int, Region]]] = [[] for _ in trainer.positions]
    pieces: dict[str, tuple[str, Region]] = {}
    taken_from: list[tuple[int, tuple[int, Region]]] = []
    kinds = []
    for name, found in parts.items():
        dtype = trainer.layout.specs[trainer.layout.index[name]].dtype
        for rank, part in found:
            for source, region, at in trainer.origin(name, part):
                piece = (trainer.positions[rank][source], region)
                requests[rank].append(piece)
                taken_from.append((rank, piece))
                view = name + write_region(at)
                pieces[view] = (name, at)
                kinds.append((view, dtype, shape_of(at)))
    sources = []
    for rank_address, request in zip(
        address.scheme.addresses, map(Request.of, requests), strict=True
    ):
        holding = _holding(rank_address)
        layout = request.layout(holding.tensors, verified=holding.verified)
        sources.append(RankSource(rank_address, request, layout))
    places = [{piece: i for i, piece in enumerate(s.request.regions)} for s in sources]
    layout = Layout.of_kinds(kinds)
    origins = tuple((rank, places[rank][piece]) for rank, piece in taken_from)
    scheme = JoinedScheme(address.scheme.addresses, JoinPlan(tuple(sources), layout, origins))
    return (
        replace(address, scheme=scheme, endpoint=None, layout=layout, source_layout=layout),
        RegionViews(model, regions, pieces),
    )


class JoinedReceiver(ReceiverTransport):
    """Receives one version from all ranks, and gives it when all of them have it.

    Args:
        context: of the receiver.
        joined: how a version is made.
    """

    def __init__(self, context: TransportContext, joined: JoinPlan) -> None:
        self._joined = joined
        #: How long to wait for ranks that have not sent a version, in seconds.
        self._patience = context.timeout / 2
        self._seen = 0
        self._since: float | None = None
        with ExitStack() as opened:
            self._ends = []
            for source in joined.sources:
                end = _RankReceiver(source, context)
                opened.callback(end.close)
                self._ends.append(end)
            deadline = time.monotonic() + context.timeout
            for end in self._ends:
                end.greet(max(0.0, deadline - time.monotonic()))
            opened.pop_all()

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version that all ranks have sent."""
        deadline = time.monotonic() + timeout
        since = time.perf_counter()
        try:
            complete = self._collect(deadline)
        except (CorruptionError, SenderLostError) as error:
            self._refuse(error)
            raise
        if not complete:
            self._give_up_if_late()
            return None
        self._seen, self._since = self._ends[0].version, None
        payloads = [end.take() for end in self._ends]
        tensors: list[Tensor] = []
        found = [payload.tensors for payload in payloads]
        tensors = [found[source][position] for source, position in self._joined.origins]
        known = [payload.known_at for payload in payloads]
        known_at = None if None in known else min(filter(None, known), default=None)
        return Payload(
            self._seen,
            self._joined.layout,
            tensors,
            release=_all_of([payload.release for payload in payloads]),
            known_at=known_at,
            stage_seconds=time.perf_counter() - (since if known_at is None else known_at),
        )

    def acknowledge(self, answer: Answer) -> None:
        """Answer all ranks."""
        lost: SenderLostError | None = None
        for end in self._ends:
            try:
                end.answer(answer)
            except SenderLostError as error:
                lost = error
        if lost is not None:
            raise lost

    def wake(self) -> None:
        """Wake the transport of every rank."""
        for end in self._ends:
            end.transport.wake()

    def leave(self, reason: str) -> None:
        """Let all ranks know."""
        for end in self._ends:
            end.transport.leave(reason)

    def close(self) -> None:
        """Release what has come, and every connection."""
        for end in self._ends:
            end.close()

    def _collect(self, deadline: float) -> bool:
        """Stage the same version of every rank; False where that takes longer."""
        for end in self._ends:
            # Until there is some version, none is waited for but the first rank's.
            if end.version <= self._seen and self._newest() <= self._seen:
                end.stage(max(0.0, deadline - time.monotonic()))
        while self._newest() > self._seen:
            behind = [end for end in self._ends if end.version < self._newest()]
            if not behind:
                return True
            self._since = self._since or time.monotonic()
            for end in behind:
                end.overtake(self._newest())
            # All are looked at, so that those which are behind can be named.
            staged = [end.stage(max(0.0, deadline - time.monotonic())) for end in behind]
            if not all(staged):
                return False
        return False

    def _newest(self) -> int:
        return max(end.version for end in self._ends)

    def _give_up_if_late(self) -> None:
        newest = self._newest()
        if self._since is None or time.monotonic() < self._since + self._patience:
            return
        behind = [end for end in self._ends if end.version < newest]
        named = ", ".join(f"rank {end.rank}" for end in behind)
        error = SyncError(
            f"version {newest} came from {len(self._ends) - len(behind)} of {len(self._ends)} "
            f"ranks, and not from {named} within {self._patience:g} s; nothing was written: does "
            "every rank call send(), with the same version?"
        )
        self._refuse(error)
        raise error

    def _refuse(self, error: SyncError) -> None:
        """Drop what has come of a version that is not complete, and say why."""
        self._since = None
        for end in self._ends:
            end.drop(error)


class _RankReceiver:
    """Receives what one rank sends, and tells it what this worker wants.

    Args:
        source: the rank.
        context: of the joined receiver.
    """

    def __init__(self, source: RankSource, context: TransportContext) -> None:
        self._source = source
        address = source.address
        self.rank = _rank(address)
        #: The position of the version in a payload: after the parts, before the checksums.
        self._version_at = source.layout.index[SHARD_VERSION]
        self._is_verified = _holding(address).verified
        backend, stack = inner_stack(address.scheme.inner)
        own = address.transport_context(
            backend.name, context.timeout, background=context.background
        )
        self.transport = stack.create_receiver_transport(
            replace(own, endpoint=address.endpoint.inner, layout=source.layout)
        )
        self._request = source.request.to_text()
        self._staged: Payload | None = None
        #: The version that is staged, or else the one that was taken last; 0 before the first.
        self.version = 0
        self._taken = 0
        # The number of the inner transport for the version that was taken last.
        self._number = 0

    def greet(self, timeout: float) -> None:
        """Answer the first question, which the rank has asked already."""
        payload = self._receive(timeout)
        if payload is not None:
            # The rank has learned it; there will be other versions.
            with suppress(CorruptionError):
                self._look_at(payload)

    def stage(self, timeout: float) -> bool:
        """Wait for a version; False where none comes in time."""
        deadline = time.monotonic() + timeout
        while True:
            payload = self._receive(max(0.0, deadline - time.monotonic()))
            if payload is None:
                return False
            if self._look_at(payload):
                return True

    def take(self) -> Payload:
        """The payload that is staged."""
        payload, self._staged = self._staged, None
        assert payload is not None
        self._number, self._taken = payload.version, self.version
        return payload

    def answer(self, answer: Answer) -> None:
        """Answer for the version that was taken last."""
        self.transport.acknowledge(replace(answer, version=self._number))

    def overtake(self, version: int) -> None:
        """Drop what is staged, as another rank has sent a newer version."""
        self.drop(SyncError(f"another rank has sent version {version} already"))

    def drop(self, error: SyncError) -> None:
        """Refuse what is staged."""
        payload, self._staged = self._staged, None
        self.version = self._taken
        if payload is not None:
            payload.release()
            self._refuse(payload, error)

    def close(self) -> None:
        """Hang up."""
        payload, self._staged = self._staged, None
        if payload is not None:
            payload.release()
        self.transport.close()

    def _receive(self, timeout: float) -> Payload | None:
        try:
            return self.transport.receive(timeout)
        except SenderLostError as error:
            size = _holding(self._source.address).ranks.size
            raise SenderLostError(f"rank {self.rank} of {size}: {error}") from error

    def _look_at(self, payload: Payload) -> bool:
        """Stage a payload, if it is what this worker wants."""
        if payload.layout != self._source.layout:
            asked = payload.layout.names == (ASK,)
            payload.release()
            said = "says what it wants" if asked else "wants other regions than these"
            self._refuse(payload, SyncError(f"this worker {said}"), self._request)
            return False
        self.drop(SyncError("a newer version came before this one was committed"))
        if self._is_verified:
            self._verify(payload)
        self._staged = payload
        self.version = int(payload.tensors[self._version_at].item())
        return True

    def _verify(self, payload: Payload) -> None:
        names = broken(payload.layout, payload.tensors)
        if not names:
            return
        named = ", ".join(map(repr, names[:_NAMES_SHOWN]))
        more = f", … {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        error = CorruptionError(
            self._source.address.worker_id,
            f"what rank {self.rank} has sent was changed on its way, and nothing of the version "
            f"was applied: {named}{more} differ from their checksums",
        )
        payload.release()
        self._refuse(payload, error)
        raise error

    def _refuse(self, payload: Payload, error: SyncError, request: str | None = None) -> None:
        refusal = replace(Answer.refusal(payload.version, error), request=request)
        # The next receive() says that the rank has gone.
        with suppress(SenderLostError):
            self.transport.acknowledge(refusal)


def _all_of(functions: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call_all() -> None:
        for function in functions:
            function()

    return call_all
