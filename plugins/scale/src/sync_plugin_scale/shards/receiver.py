"""The worker's side of sharding: one version, joined from what all ranks of a trainer send."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sync_core import Address, Answer, Layout, Payload, ReceiverTransport, TransportContext
from sync_core.errors import CorruptionError, OptionError, SenderLostError, SyncError
from sync_core.models import Region
from sync_plugin_scale.shards.endpoint import RankEndpoint
from sync_plugin_scale.shards.local import RegionViews
from sync_plugin_scale.shards.plan import inside, plan_parts, shape_of, whole_region, write_region
from sync_plugin_scale.shards.request import ASK, VERSION, Request, broken
from sync_plugin_scale.shards.whole_model import WholeModel, has_extra_state, wanted_regions

if TYPE_CHECKING:
    from sync_plugin_scale.shards.scheme import Sharded

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RankSource:
    """The part of a version that one rank sends to this worker.

    Args:
        endpoint: the rank's.
        request: what is asked of it.
        layout: of what it sends.
    """

    endpoint: RankEndpoint
    request: Request
    layout: Layout


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """The way in which a version is made of the payloads of all ranks.

    Args:
        sources: the ranks.
        layout: of the version: the parts that are written into the model, or whole tensors.
        origins: for each part, the position of its source, and that of the tensor in the source's
            layout.
        places: for whole tensors: for each part, the position of its tensor in ``layout``, and the
            region of that. None where the version is the parts.
    """

    sources: tuple[RankSource, ...]
    layout: Layout
    origins: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, Region], ...] | None = None


def join(address: Address, model: Any) -> tuple[Address, Any]:
    """Plan what a worker takes from each rank, and return what its receiver works with.

    Args:
        address: what `join_addresses` returned.
        model: a module, a mapping of tensors, distributed or plain, or a `Part`. None, or a
            module with extra state, gets whole tensors.

    Returns:
        The address with the plan in it, and views of the model's tensors, one for each part.

    Raises:
        LayoutMismatchError: the model and the trainer's do not fit; both are in the message.
        ModelError: the model cannot be read.
    """
    ranks: tuple[RankEndpoint, ...] = address.endpoint.ranks
    if any(rank.holding.verified for rank in ranks):
        _check_hash_library()
    trainer = WholeModel([rank.holding for rank in ranks])
    layout = trainer.layout
    wanted = {name: whole_region(layout.specs[layout.index[name]].shape) for name in layout.names}
    assembled = model is None or has_extra_state(model)
    if not assembled:
        wanted = wanted_regions(model, trainer, cast=address.cast)
    held = {name: trainer.held(name) for name in wanted}
    parts = plan_parts(held, wanted, destination=address.worker_id)
    requests: list[list[tuple[int, Region]]] = [[] for _ in ranks]
    pieces: list[tuple[str, Region]] = []
    taken_from: list[tuple[int, tuple[int, Region]]] = []
    for name, found in parts.items():
        for rank, part in found:
            for source, region, at in trainer.origin(name, part):
                piece = (trainer.positions[rank][source], region)
                requests[rank].append(piece)
                taken_from.append((rank, piece))
                pieces.append((name, at))
    sources = []
    for rank_endpoint, request in zip(ranks, map(Request.of, requests), strict=True):
        holding = rank_endpoint.holding
        sent = request.layout(holding.tensors, verified=holding.verified)
        sources.append(RankSource(rank_endpoint, request, sent))
    found_at = [{piece: i for i, piece in enumerate(s.request.regions)} for s in sources]
    origins = tuple((rank, found_at[rank][piece]) for rank, piece in taken_from)
    if assembled:
        places = tuple((layout.index[name], at) for name, at in pieces)
        joined = JoinPlan(tuple(sources), layout, origins, places)
        return replace(address, endpoint=joined, layout=layout, source_layout=layout), model
    views = {}
    kinds = []
    for name, at in pieces:
        spec = layout.specs[layout.index[name]]
        view = name if at == whole_region(spec.shape) else name + write_region(at)
        views[view] = (name, at)
        kinds.append((view, spec.dtype, shape_of(at)))
    layout = Layout.of_kinds(kinds)
    joined = JoinPlan(tuple(sources), layout, origins)
    address = replace(address, endpoint=joined, layout=layout, source_layout=layout)
    return address, RegionViews(model, views)


def refuse(address: Address, scheme: Sharded, error: Exception, timeout: float) -> None:
    """Connect only to let each rank know, at once, why this worker cannot receive."""
    context = address.transport_context(scheme.name, timeout)
    for rank in address.endpoint.ranks:
        # The caller gets the reason, and not that a rank could not be reached.
        with suppress(Exception), closing(scheme.inner_rank(context, rank)) as transport:
            payload = transport.receive(0.0)
            if payload is not None:
                payload.release()
                transport.acknowledge(Answer.refusal(payload.version, error))
            transport.leave(f"refused to receive: {type(error).__name__}: {error}")


def _check_hash_library() -> None:
    try:
        import xxhash  # noqa: F401
    except ImportError as error:
        raise OptionError(
            'the trainer sends checksums, which need: pip install "sync-core[verify]"'
        ) from error


class JoinedReceiver(ReceiverTransport):
    """Receives one version from all ranks, and gives it when all of them have it.

    Args:
        context: of the receiver.
        scheme: makes the inner transports.
        joined: how a version is made.
    """

    def __init__(self, context: TransportContext, scheme: Sharded, joined: JoinPlan) -> None:
        self._joined = joined
        # Of whole tensors that come in several parts, by position; made with the first version.
        self._whole: dict[int, Tensor] = {}
        #: How long to wait for ranks that have not sent a version, in seconds.
        self._patience = context.timeout / 2
        self._seen = 0
        self._since: float | None = None
        with ExitStack() as opened:
            self._ends = []
            for source in joined.sources:
                end = _RankReceiver(source, context, scheme)
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
        found = [payload.tensors for payload in payloads]
        tensors = [found[source][position] for source, position in self._joined.origins]
        if self._joined.places is not None:
            tensors = self._assembled(tensors, self._joined.places)
        known = [payload.known_at for payload in payloads]
        known_at = None if None in known else min(filter(None, known), default=None)
        layout, extras = self._with_extras(payloads[0])
        return Payload(
            self._seen,
            layout,
            [*tensors, *extras],
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

    def _with_extras(self, payload: Payload) -> tuple[Layout, Sequence[Tensor]]:
        """Return the layout of a version with extras, and those of the first rank."""
        plain = self._joined.layout
        specs = payload.layout.specs[len(payload.layout.plain.specs) :]
        if not specs:
            return plain, ()
        kinds = [(spec.name, spec.dtype, spec.shape) for spec in (*plain.specs, *specs)]
        layout = Layout(Layout.of_kinds(kinds).specs, plain.aliases)
        return layout, payload.tensors[-len(specs) :]

    def _assembled(
        self, parts: Sequence[Tensor], places: Sequence[tuple[int, Region]]
    ) -> list[Tensor]:
        """Return whole tensors, in the order of the layout; good until the next version."""
        layout = self._joined.layout
        tensors: dict[int, Tensor] = {}
        for part, (position, region) in zip(parts, places, strict=True):
            spec = layout.specs[position]
            if tuple(part.shape) == spec.shape:
                tensors[position] = part
                continue
            if position not in self._whole:
                self._whole[position] = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
            tensors[position] = self._whole[position]
            tensors[position][inside(region, whole_region(spec.shape))].copy_(part)
        # A tensor without elements has no parts.
        return [
            tensors[i] if i in tensors else torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
            for i, spec in enumerate(layout.specs)
        ]

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
        scheme: makes the inner transport.
    """

    def __init__(self, source: RankSource, context: TransportContext, scheme: Sharded) -> None:
        self._source = source
        self._worker_id = context.worker_id
        self.rank = source.endpoint.holding.rank
        #: The position of the version in a payload: after the parts, before the checksums.
        self._version_at = source.layout.index[VERSION]
        self.transport = scheme.inner_rank(context, source.endpoint, layout=source.layout)
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
            size = self._source.endpoint.holding.size
            raise SenderLostError(f"rank {self.rank} of {size}: {error}") from error

    def _look_at(self, payload: Payload) -> bool:
        """Stage a payload, if it is what this worker wants."""
        if payload.layout.plain != self._source.layout:
            asked = payload.layout.names == (ASK,)
            payload.release()
            said = "says what it wants" if asked else "wants other regions than these"
            self._refuse(payload, SyncError(f"this worker {said}"), self._request)
            return False
        self.drop(SyncError("a newer version came before this one was committed"))
        if self._source.endpoint.holding.verified:
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
            self._worker_id,
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
