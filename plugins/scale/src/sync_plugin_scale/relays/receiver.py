"""The worker's side: puts versions together from chunks."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sync_core import (
    Answer,
    CapacityError,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SyncError,
    TransportContext,
)
from sync_core.errors import AddressError, PayloadError
from sync_plugin_scale.relays.version import (
    CHUNK,
    CHUNK_HEAD,
    HEAD,
    LANES,
    ChunkedVersion,
    lane_context,
)
from sync_plugin_scale.resending import AGAIN

if TYPE_CHECKING:
    from sync_plugin_scale.relays.chunks import Chunked


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
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
        # That of the version before, which need not be read again.
        self._known = context.layout
        self._chunk_nbytes = scheme.nbytes
        self._version: ChunkedVersion | None = None
        self._next = 0
        # The version that came last, and by which version of which inner transport it ended.
        self._last = (0, 0, 0)
        self._since = 0.0
        # The version of the inner transport that brought the first chunk.
        self._begun = 0
        self._lanes: list[ReceiverTransport] = []
        if len(context.endpoint) != LANES:
            raise AddressError(
                f"the endpoint of an address of scheme {scheme.name!r} must have {LANES} parts, "
                f"got {len(context.endpoint)}; type sender.address(worker_id)"
            )
        with ExitStack() as opened:
            for lane, endpoint in enumerate(context.endpoint):
                inner = lane_context(context, scheme.nbytes, lane)
                self._lanes.append(scheme.inner_receiver(replace(inner, endpoint=endpoint)))
                opened.callback(self._lanes[-1].close)
            opened.pop_all()

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version once its last chunk is there."""
        deadline = time.monotonic() + timeout
        while (chunk := self.next_chunk(max(0.0, deadline - time.monotonic()))) is not None:
            version = self.keep(chunk)
            if chunk.index == version.count - 1:
                self._version = None
                payload = Payload.unpack(
                    version.block, version.version, known=self._known, since=self._since
                )
                self._known = payload.layout
                return payload
        return None

    def next_chunk(self, timeout: float) -> ReceivedChunk | None:
        """The next chunk of a version; `keep` has to follow."""
        deadline = time.monotonic() + timeout
        while True:
            lane = self._next % LANES
            payload = self._lanes[lane].receive(max(0.0, deadline - time.monotonic()))
            if payload is None:
                return None
            try:
                chunk = self._read(payload, lane)
            except PayloadError as wrong:
                self._refuse(payload, lane, wrong)
                raise
            known = self._version
            kept = None if known is None or self._next < 2 else (known.version, known.nbytes)
            # The first chunk once more has crossed an answer. The chunks that came after it would
            # not come once more, so they are asked for.
            if chunk.index == 0 and kept != (chunk.version, chunk.nbytes):
                self._since = payload.known_at or time.perf_counter()
                self._begun = payload.version
                try:
                    self._version = ChunkedVersion(chunk.version, chunk.nbytes, chunk.chunk_nbytes)
                except CapacityError as shortage:
                    self._refuse(payload, lane, shortage)
                    raise
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

    def _refuse(self, payload: Payload, lane: int, error: SyncError) -> None:
        self._version, self._next = None, 0
        payload.release()
        self._lanes[lane].acknowledge(Answer.refusal(payload.version, error))

    def _read(self, payload: Payload, lane: int) -> ReceivedChunk:
        """Return the chunk in a payload, once it is one that the agreed layout gives reason for."""
        if payload.layout.names != (CHUNK, CHUNK_HEAD):
            raise PayloadError(f"expected a chunk, got {', '.join(payload.layout.names)[:200]}")
        data, head = payload.tensors
        kinds = [(tensor.dtype, tensor.dim()) for tensor in payload.tensors]
        if kinds != [(torch.uint8, 1), (torch.int64, 1)] or head.numel() != HEAD:
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
        return ReceivedChunk(version, index, nbytes, chunk_nbytes, data, payload, lane)

    def keep(self, chunk: ReceivedChunk) -> ChunkedVersion:
        """Copy a chunk, answer unless it is the last, and return its version."""
        version = self._version
        assert version is not None
        version.chunk(chunk.index).copy_(chunk.data)
        chunk.payload.release()
        self._next = chunk.index + 1
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
