"""A transport that sends a version in chunks, each of which is a version of the scheme's own.

A worker answers each chunk when it has copied it, and the last one when it has committed the
version. There are two transports, which take turns, so that one chunk is on its way while the one
before it is answered.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from sync_core import (
    Answer,
    Delivery,
    Layout,
    OptionError,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    SyncError,
    TransportContext,
    WorkerError,
)
from sync_core.errors import AddressError, PayloadError
from sync_core.registry import Plugin
from sync_core.transports import RESERVED_PREFIX, BackgroundReceiver, Block, Notice, unheard
from sync_core.wrapping import WrappingScheme
from sync_plugin_scale.two_phase.scheme import refuse_inside

_log = logging.getLogger("sync_core")
# The names of the tensors of a chunk: its bytes, and what it is a chunk of.
_CHUNK, _CHUNK_HEAD = RESERVED_PREFIX + "chunk", RESERVED_PREFIX + "chunk_head"
_LANES = 2
# The numbers of a chunk: version, index, bytes of the version, bytes of a chunk.
_HEAD = 4
#: The request of a worker that lacks the chunks before the one it got.
AGAIN = "again"
# How often a worker may ask for a version from its first chunk. It does so once when it is new in
# its place, and once when a newer version has come first.
_MOST_RESTARTS = 32
# How long closing waits for a chunk that is being sent, in seconds; an estimate.
_PATIENCE = 5.0


@dataclass(frozen=True)
class Chunked(WrappingScheme):
    """A scheme whose versions travel in chunks over another scheme, which relays can pass on.

    While one chunk is on its way, the one before it is answered: see `Relay`.

    Args:
        inner: the scheme that carries the chunks.
        mb: the size of a chunk, in MB (1e6 bytes).

    Raises:
        OptionError: the size is not one, or nothing travels by the inner scheme.

    Example:
        >>> from sync_core import Receiver, Sender
        >>> policy, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Sender(Chunked("thread", mb=1), policy, num_workers=1) as sender:
        ...     pending = sender.send_async()
        ...     Receiver(sender.address(0), model).receive(), pending.wait().updated
        (1, (0,))
    """

    wrapper: ClassVar[str] = "chunked"
    endpoint_type: ClassVar[type] = list
    keeps: ClassVar[frozenset[str]] = frozenset(
        {"background", "cross_host", "cross_process", "late_join", "pull"}
    )

    mb: float = 4.0

    def __post_init__(self) -> None:
        number = isinstance(self.mb, int | float) and not isinstance(self.mb, bool)
        if not number or not 0 < self.mb < math.inf:
            raise OptionError(f"mb must be a size in MB, such as 4, got {self.mb!r}")

    @cached_property
    def plugin(self) -> Plugin:
        """The inner scheme.

        Raises:
            PluginError: it cannot be found or used.
            OptionError: it decides about each chunk.
        """
        return refuse_inside(super().plugin, self.wrapper)

    @property
    def nbytes(self) -> int:
        """The size of a chunk in bytes."""
        return max(1, int(self.mb * 1e6))

    def endpoint_to_json(self, endpoint: Any) -> Any:
        """Return the endpoints of both transports as plain values."""
        return [super(Chunked, self).endpoint_to_json(each) for each in endpoint]

    def endpoint_from_json(self, value: Any) -> list[Any]:
        """Return the endpoints of both transports."""
        if not isinstance(value, list) or len(value) != _LANES:
            raise AddressError(f"an address of {self.name} must have a list of {_LANES} endpoints")
        return [super(Chunked, self).endpoint_from_json(each) for each in value]

    def create_sender(self, context: TransportContext) -> ChunkedSender:
        """Make the sender's side."""
        if context.workers:
            raise OptionError(
                f"{self.name} needs workers that connect by addresses; give num_workers"
            )
        if "slots" in context.options:
            raise OptionError(
                f"slots= cannot be given with {self.name}, since each worker's chunk takes a slot "
                "of its own, which has the size of a chunk; leave slots= out"
            )
        return ChunkedSender(context, self)

    def create_receiver(self, context: TransportContext) -> ReceiverTransport:
        """Make a receiver's side, which puts versions together in the background if asked to."""
        receiver = ChunkedReceiver(replace(context, background=False), self)
        return BackgroundReceiver(receiver) if context.background else receiver


#: An inner transport, a delivery of it, and its outcome.
_Event: TypeAlias = tuple[int, Delivery, WorkerError | None]


@lru_cache(maxsize=64)
def _chunk_layout(nbytes: int) -> Layout:
    return Layout.of_kinds([(_CHUNK, torch.uint8, (nbytes,)), (_CHUNK_HEAD, torch.int64, (_HEAD,))])


def _lane_context(context: TransportContext, scheme: Chunked, lane: int) -> TransportContext:
    """The context of one of the inner transports, which do not share a secret."""
    return replace(
        context,
        token=f"{context.token}-{lane}",
        layout=_chunk_layout(scheme.nbytes),
        zero_copy=False,
        # Chunks are of no use to readers of the inner scheme alone.
        make_address=None,
    )


class ChunkedVersion:
    """The bytes of a version, of which the first chunks are there.

    Args:
        version: the version.
        nbytes: of all of it, header and body.
        chunk_nbytes: of each chunk but the last.
    """

    def __init__(self, version: int, nbytes: int, chunk_nbytes: int) -> None:
        self.version = version
        self.nbytes = nbytes
        self.count = -(-nbytes // chunk_nbytes)
        self.block = Block.allocate(nbytes)
        #: How many chunks are there.
        self.available = 0
        self._chunk_nbytes = chunk_nbytes

    def chunk(self, index: int) -> Tensor:
        """The memory of a chunk."""
        first = index * self._chunk_nbytes
        return self.block.memory[first : min(first + self._chunk_nbytes, self.nbytes)]

    def payload(self, index: int, number: int) -> Payload:
        """A chunk as a version of the inner transport."""
        data = self.chunk(index)
        head = torch.tensor([self.version, index, self.nbytes, self._chunk_nbytes], device="cpu")
        return Payload(number, _chunk_layout(len(data)), (data, head))


@dataclass(eq=False)
class _Progress:
    """The progress of one worker with a version.

    Args:
        version: the version.
        delivery: ends when the worker has committed it, or cannot.
        index: the chunk that it gets next.
        sent: for each transport, the chunk that it was given last, and its delivery: another
            receiver in the worker's place is given that one first, and asks for the others.
        busy: the transports whose chunk was not answered.
        restarts: how often the worker has asked for the version from its first chunk.
    """

    version: ChunkedVersion
    delivery: Delivery
    index: int = 0
    sent: dict[int, tuple[int, Delivery]] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    restarts: int = 0


class ChunkedSender(SenderTransport):
    """Sends each worker one chunk after the other, in its own thread.

    Args:
        context: what the sender gave to `create_transport`.
        scheme: the scheme.
    """

    def __init__(self, context: TransportContext, scheme: Chunked) -> None:
        self._chunk_nbytes = scheme.nbytes
        self._notify = context.notify
        # Of the inner transports, which take the calls of one thread at a time. Callbacks of these,
        # which have locks of their own, never take it.
        self._lock = threading.RLock()
        self._number = 0
        self._workers: dict[int, _Progress | None] = dict.fromkeys(context.worker_ids)
        self._newest: ChunkedVersion | None = None
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._lanes: list[SenderTransport] = []
        with ExitStack() as opened:
            for lane in range(_LANES):
                lane_context = replace(
                    _lane_context(context, scheme, lane),
                    models=(),
                    notify=unheard if lane else self._hear,
                )
                self._lanes.append(scheme.inner_sender(lane_context))
                opened.callback(self._lanes[-1].close)
            opened.pop_all()
        self._thread = threading.Thread(target=self._run, name="sync-chunks", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> Any:
        """Return the endpoints of the inner transports."""
        with self._lock:
            return [lane.address(worker_id) for lane in self._lanes]

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Pack the version, and send its first chunk; one that is streamed, while it is packed."""
        version = ChunkedVersion(payload.version, payload.nbytes, self._chunk_nbytes)
        if payload.is_streamed:
            return self._send_streamed(payload, version, worker_ids)
        payload.pack(version.block)
        version.available = version.count
        return self.begin(version, worker_ids)

    def _send_streamed(
        self, payload: Payload, version: ChunkedVersion, worker_ids: Sequence[int]
    ) -> dict[int, Delivery]:
        with self._lock:
            before = dict(self._workers), self._newest
        deliveries = self.begin(version, worker_ids)
        try:
            for done in payload.pack_in_steps(version.block):
                whole = done == payload.nbytes
                available = version.count if whole else done // self._chunk_nbytes
                if available > version.available:
                    self.more(version, available)
        except BaseException as error:
            self._withdraw(version, *before)
            for worker_id, delivery in deliveries.items():
                message = f"version {version.version} was withdrawn, since {error}"
                delivery.fail(WorkerError(worker_id, message))
            raise
        return deliveries

    def _withdraw(
        self,
        version: ChunkedVersion,
        workers: Mapping[int, _Progress | None],
        newest: ChunkedVersion | None,
    ) -> None:
        """Forget a version whose last chunk will not come, and send those before it again."""
        with self._lock:
            if self._newest is version:
                self._newest = newest
            for worker_id, progress in self._workers.items():
                if progress is None or progress.version is not version:
                    continue
                self._workers[worker_id] = earlier = workers.get(worker_id)
                if earlier is not None:
                    # Also to a worker that has it, and discards it: another receiver in its place
                    # would find chunks of the one that is forgotten, and wait for the others.
                    self._workers[worker_id] = _Progress(earlier.version, earlier.delivery)
                    self._continue(worker_id)

    def begin(self, version: ChunkedVersion, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Send what is there of a version; `more` sends the rest."""
        deliveries = {i: Delivery(i, version.version, version.nbytes) for i in worker_ids}
        with self._lock:
            if deliveries.keys() >= self._workers.keys():
                self._newest = version
            for worker_id, delivery in deliveries.items():
                self._workers[worker_id] = _Progress(version, delivery)
            for worker_id in worker_ids:
                self._continue(worker_id)
        return deliveries

    def more(self, version: ChunkedVersion, available: int) -> None:
        """Send further chunks of a version.

        Args:
            version: the version.
            available: how many of its chunks there are now.
        """
        with self._lock:
            version.available = available
            for worker_id in tuple(self._workers):
                self._continue(worker_id)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which gets the newest version that went to all."""
        with self._lock:
            for lane in self._lanes:
                lane.add_worker(worker_id, worker)
            self._workers[worker_id] = None
            if self._newest is not None:
                delivery = Delivery(worker_id, self._newest.version, self._newest.nbytes)
                delivery.watch(partial(_report_late, self._notify))
                self._workers[worker_id] = _Progress(self._newest, delivery)
                self._continue(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker."""
        with self._lock:
            progress = self._workers.pop(worker_id)
            for lane in self._lanes:
                lane.remove_worker(worker_id)
        if progress is not None:
            progress.delivery.fail(WorkerError(worker_id, "was removed from the sender"))

    def close(self) -> None:
        """End the thread, and close the inner transports."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        with self._lock:
            for lane in self._lanes:
                lane.close()
            progresses = list(self._workers.items())
            self._newest = None
            self._workers.clear()
        for worker_id, progress in progresses:
            if progress is not None:
                progress.delivery.fail(WorkerError(worker_id, "the sender was closed"))

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            lane, delivery, error = event
            with self._lock:
                progress = self._workers.get(delivery.worker_id)
                if progress is not None:
                    index, sent = progress.sent.get(lane, (0, None))
                    if sent is delivery:
                        try:
                            self._act(progress, lane, index, delivery, error)
                        except Exception as failure:
                            _log.exception("worker %d is sent no more", delivery.worker_id)
                            message = f"could not be sent the next chunk: {failure!r}"
                            progress.delivery.fail(WorkerError(delivery.worker_id, message))

    def _act(
        self,
        progress: _Progress,
        lane: int,
        index: int,
        sent: Delivery,
        error: WorkerError | None,
    ) -> None:
        """Act on an outcome of a chunk, perhaps one that comes after another outcome."""
        answer = sent.latest
        if answer is not None and answer.request == AGAIN:
            # Another receiver has come in the worker's place, or it has seen a newer version first.
            progress.restarts += 1
            if progress.restarts > _MOST_RESTARTS:
                progress.index = progress.version.count
                progress.delivery.fail(_refused_all(progress))
                return
            progress.index = 0
            progress.busy.clear()
        elif error is not None and sent.error is None:
            # The worker left after its answer. The transport has reported that by a notice, and
            # another receiver may have the worker's place by now.
            return
        elif error is not None and (answer is None or answer.error is None):
            progress.delivery.fail(error)
        elif index == progress.version.count - 1 or error is not None:
            if answer is not None:
                answer = replace(answer, version=progress.version.version)
            progress.delivery.acknowledge(answer)
        else:
            progress.busy.discard(lane)
        self._continue(sent.worker_id)

    def _continue(self, worker_id: int) -> None:
        """Send a worker the next chunks that are there, one by each transport that is free."""
        progress = self._workers[worker_id]
        while progress is not None and progress.index < progress.version.available:
            lane = progress.index % _LANES
            if lane in progress.busy:
                return
            self._number += 1
            payload = progress.version.payload(progress.index, self._number)
            try:
                sent = self._lanes[lane].send(payload, (worker_id,))[worker_id]
            except Exception as error:
                message = f"version {progress.version.version} could not be sent: {error!r}"
                progress.delivery.fail(WorkerError(worker_id, message))
                return
            progress.sent[lane] = progress.index, sent
            progress.busy.add(lane)
            progress.index += 1
            sent.watch(partial(_put, self._events, lane))

    def _hear(self, worker_id: int, notice: Notice) -> None:
        # An acknowledgement is about a chunk.
        if notice.kind != "acknowledged":
            self._notify(worker_id, notice)


def _refused_all(progress: _Progress) -> WorkerError:
    message = (
        f"asked {progress.restarts} times for version {progress.version.version} from its first "
        "chunk; does another receiver use the same address?"
    )
    return WorkerError(progress.delivery.worker_id, message)


def _put(
    events: queue.SimpleQueue[_Event | None],
    lane: int,
    delivery: Delivery,
    error: WorkerError | None,
) -> None:
    events.put((lane, delivery, error))


def _report_late(notify: Any, delivery: Delivery, error: WorkerError | None) -> None:
    """Report a version that a worker got when it was added."""
    if error is None:
        notify(delivery.worker_id, Notice("acknowledged", version=delivery.version))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that has come.

    Args:
        version: its version.
        index: its position among the version's chunks.
        nbytes: of the whole version.
        chunk_nbytes: of each chunk but the last.
        data: its bytes.
        payload: the inner transport's version that brought it.
        lane: which of the inner transports that was.
    """

    version: int
    index: int
    nbytes: int
    chunk_nbytes: int
    data: Tensor
    payload: Payload
    lane: int


class ChunkedReceiver(ReceiverTransport):
    """Puts versions together from chunks.

    Args:
        context: of the receiver.
        scheme: the scheme.
    """

    def __init__(self, context: TransportContext, scheme: Chunked) -> None:
        self._layout = context.layout
        self._chunk_nbytes = scheme.nbytes
        self._version: ChunkedVersion | None = None
        self._next = 0
        # The version that came last, and by which version of which inner transport it ended.
        self._last = (0, 0, 0)
        self._since = 0.0
        # The version of the inner transport that brought the first chunk.
        self._begun = 0
        self._lanes: list[ReceiverTransport] = []
        if len(context.endpoint) != _LANES:
            raise AddressError(
                f"the endpoint of an address of scheme {scheme.name!r} must have {_LANES} parts, "
                f"got {len(context.endpoint)}; type sender.address(worker_id)"
            )
        with ExitStack() as opened:
            for lane, endpoint in enumerate(context.endpoint):
                lane_context = replace(_lane_context(context, scheme, lane), endpoint=endpoint)
                self._lanes.append(scheme.inner_receiver(lane_context))
                opened.callback(self._lanes[-1].close)
            opened.pop_all()

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version once its last chunk is there."""
        deadline = time.monotonic() + timeout
        while (chunk := self.next_chunk(max(0.0, deadline - time.monotonic()))) is not None:
            version = self.keep(chunk)
            if chunk.index == version.count - 1:
                self._version = None
                return Payload.unpack(
                    version.block, version.version, known=self._layout, since=self._since
                )
        return None

    def next_chunk(self, timeout: float) -> Chunk | None:
        """The next chunk of a version; `keep` has to follow."""
        deadline = time.monotonic() + timeout
        while True:
            lane = self._next % _LANES
            payload = self._lanes[lane].receive(max(0.0, deadline - time.monotonic()))
            if payload is None:
                return None
            try:
                chunk = self._read(payload, lane)
            except PayloadError as wrong:
                self._version, self._next = None, 0
                payload.release()
                self._lanes[lane].acknowledge(Answer.refusal(payload.version, wrong))
                raise
            known = self._version
            kept = None if known is None or self._next < 2 else (known.version, known.nbytes)
            # The first chunk once more has crossed an answer. The chunks that came after it would
            # not come once more, so they are asked for.
            if chunk.index == 0 and kept != (chunk.version, chunk.nbytes):
                self._since = payload.known_at or time.perf_counter()
                self._begun = payload.version
                self._version = ChunkedVersion(chunk.version, chunk.nbytes, chunk.chunk_nbytes)
                return chunk
            expected = None if known is None else (known.version, known.nbytes, self._next)
            if expected == (chunk.version, chunk.nbytes, chunk.index):
                return chunk
            # A chunk that was sent before the first one belongs to an older version.
            if known is None or payload.version > self._begun:
                self._version, self._next = None, 0
            payload.release()
            error = SyncError("this worker lacks the chunks before this one")
            refusal = Answer.refusal(payload.version, error)
            self._lanes[lane].acknowledge(replace(refusal, request=AGAIN))
            if time.monotonic() >= deadline:
                # The next chunk may be as wrong, and there at once.
                return None

    def _read(self, payload: Payload, lane: int) -> Chunk:
        """Return the chunk in a payload, once it is one that the agreed layout gives reason for."""
        if payload.layout.names != (_CHUNK, _CHUNK_HEAD):
            raise PayloadError(f"expected a chunk, got {', '.join(payload.layout.names)[:200]}")
        data, head = payload.tensors
        kinds = [(tensor.dtype, tensor.dim()) for tensor in payload.tensors]
        if kinds != [(torch.uint8, 1), (torch.int64, 1)] or head.numel() != _HEAD:
            raise PayloadError(f"a chunk cannot be of {payload.layout.specs}")
        version, index, nbytes, chunk_nbytes = head.tolist()
        most = nbytes if self._layout is None else self._layout.most_nbytes
        if chunk_nbytes != self._chunk_nbytes or not 0 < nbytes <= most:
            raise PayloadError(
                f"a version of {nbytes} bytes in chunks of {chunk_nbytes} is announced; chunks "
                f"have {self._chunk_nbytes} bytes, and no version has more than {most}"
            )
        expected = min(chunk_nbytes, nbytes - index * chunk_nbytes)
        if index < 0 or data.numel() != expected:
            raise PayloadError(f"chunk {index} of {nbytes} bytes has {data.numel()}")
        return Chunk(version, index, nbytes, chunk_nbytes, data, payload, lane)

    def keep(self, chunk: Chunk) -> ChunkedVersion:
        """Copy a chunk, answer unless it is the last, and return what is there of its version."""
        version = self._version
        assert version is not None
        version.chunk(chunk.index).copy_(chunk.data)
        chunk.payload.release()
        version.available = self._next = chunk.index + 1
        if chunk.index == version.count - 1:
            self._last, self._next = (version.version, chunk.lane, chunk.payload.version), 0
        else:
            with suppress(SenderLostError):
                self._lanes[chunk.lane].acknowledge(Answer(version=chunk.payload.version))
        return version

    def acknowledge(self, answer: Answer) -> None:
        """Answer for the version that came last."""
        version, lane, number = self._last
        if answer.version == version:
            self._lanes[lane].acknowledge(replace(answer, version=number))

    def wake(self) -> None:
        """Wake the inner transports."""
        for lane in self._lanes:
            lane.wake()

    def leave(self, reason: str) -> None:
        """Let the sender know."""
        for lane in self._lanes:
            lane.leave(reason)

    def close(self) -> None:
        """Release what has come, and hang up."""
        self._version = None
        for lane in self._lanes:
            lane.close()
