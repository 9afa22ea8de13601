"""The base of both kinds of ranks of a sharded trainer that write versions together.

Each rank writes the pieces of its part and a record of them. The first rank waits for all records,
and writes the manifest and the head. The other ranks wait until the head has the version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from sync_core import (
    ClosedError,
    Layout,
    LayoutMismatchError,
    OptionError,
    Payload,
    SenderTransport,
)
from sync_core.errors import PayloadError
from sync_plugin_scale import Holding
from sync_plugin_store.format import MOST_HOLDINGS, Piece, digest_of, object_name
from sync_plugin_store.holdings import (
    JoinedHoldings,
    assign,
    file_layout,
    read_holdings,
    write_holdings,
)
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.objects import Objects, Patience
from sync_plugin_store.pieces import PieceWriter
from sync_plugin_store.records import (
    RankHolding,
    Session,
    holding_name,
)

__all__ = ["HINT", "JoinedSession", "Rank", "write_ranks"]

_Found = TypeVar("_Found")
# The first pause between two looks for a record, in seconds; it doubles up to ``poll``.
_FIRST_PAUSE = 0.005
#: Added to the error when ranks have waited for each other in vain.
HINT = "does each rank call send(), with the same version and the same url?"


@dataclass(frozen=True, slots=True)
class JoinedSession:
    """The parts that all ranks of a session write.

    Args:
        session: the session.
        holdings: the parts of all ranks.
        data: ``holdings`` as bytes.
        digest: the digest of ``data``.
    """

    session: str
    holdings: JoinedHoldings
    data: bytes
    digest: str


class Rank(SenderTransport):
    """Writes one rank's part of each version.

    Args:
        objects: where the run is.
        key: signs the records; all ranks have the same key.
        holding: the parts that this rank holds.
        writer: writes the pieces.
        timeout: how long to wait for the other ranks, in seconds.
        poll: the longest time between two looks for their records, in seconds.
    """

    def __init__(
        self,
        objects: Objects,
        key: SigningKey,
        holding: Holding,
        writer: PieceWriter,
        *,
        timeout: float,
        poll: float,
    ) -> None:
        self._objects = objects
        self._key = key
        self._holding = holding
        self._writer = writer
        self._timeout = timeout
        self._poll = poll
        self._rank, self._size = holding.rank, holding.size
        self._joined: JoinedSession | None = None
        self._holdings: dict[int, Holding] = {}
        # The object that lists what this rank holds.
        self._said: Piece | None = None
        self._closing = threading.Event()

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Raise `OptionError`: readers that do not answer cannot be added."""
        del worker_id, worker
        raise OptionError(
            "this sender publishes for readers that it does not know; give each of them "
            "sender.address(), or let readers answer: Sender(Sharded('store', …), …, "
            "num_workers=0, answers=URL)"
        )

    def remove_worker(self, worker_id: int) -> None:
        """Do nothing: there are no workers."""

    def wait_for(self, look: Callable[[], _Found | None], deadline: float) -> _Found | None:
        """Call a function until it returns a result, and return that; None after the deadline.

        Raises:
            ClosedError: this sender was closed during the wait.
        """
        pause = min(_FIRST_PAUSE, self._poll)
        while (found := look()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if self._closing.wait(min(pause, left)):
                raise ClosedError("the sender is closed")
            pause = min(2 * pause, self._poll)
        return found

    def write_holding(self, session: Session) -> None:
        """Write what this rank holds, for the other ranks of a session."""
        self._joined, self._holdings = None, {self._rank: self._holding}
        data = write_holdings([self._holding])
        self._said = self._writer.write_object(data)
        record = RankHolding(session.run, session.session, self._rank, self._said)
        name = holding_name(session.session, self._rank)
        self._objects.put(name, record.to_bytes(self._key))

    def join(self, session: Session) -> JoinedSession | None:
        """Return the parts that all ranks write; None while some ranks have not begun.

        Raises:
            LayoutMismatchError: the ranks hold different models, an incomplete one, or too many
                parts.
        """
        if self._joined is not None and self._joined.session == session.session:
            return self._joined
        for rank in self.missing_holdings():
            holding = self._read_holding(session, rank)
            if holding is not None:
                self._holdings[rank] = holding
        if self.missing_holdings():
            return None
        holdings = assign([self._holdings[rank] for rank in range(self._size)])
        data = holdings.to_bytes()
        if len(data) > MOST_HOLDINGS:
            raise LayoutMismatchError(
                f"the parts that {self._size} ranks hold take {len(data)} bytes to list, and "
                f"readers take {MOST_HOLDINGS} at most; let the ranks hold fewer, larger tensors"
            )
        self._joined = JoinedSession(session.session, holdings, data, digest_of(data))
        return self._joined

    def _read_holding(self, session: Session, rank: int) -> Holding | None:
        signed = self._objects.look(holding_name(session.session, rank))
        if signed is None:
            return None
        record = RankHolding.from_bytes(signed.data, self._key.public)
        if (record.run, record.session, record.rank) != (session.run, session.session, rank):
            raise PayloadError(f"the record of rank {rank} in {self._objects.url} is another's")
        piece = record.holding
        if piece.nbytes > MOST_HOLDINGS:
            raise PayloadError(f"rank {rank} holds what takes {piece.nbytes} bytes to say")
        memory = memoryview(bytearray(piece.nbytes))
        patience = Patience(self._timeout, self._closing)
        found = self._objects.read(object_name(piece.digest), 0, memory, patience, whole=True)
        if not found or digest_of(memory) != piece.digest:
            raise PayloadError(
                f"the object in which rank {rank} says what it holds is missing or has other "
                "bytes; make a new Sender on every rank"
            )
        (holding,) = read_holdings(bytes(memory))
        if (holding.rank, holding.size) != (rank, self._size):
            raise PayloadError(
                f"rank {rank} of {self._size} says that it is rank {holding.rank} of {holding.size}"
            )
        return holding

    def missing_holdings(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._holdings]

    def part_of(self, payload: Payload, joined: JoinedSession) -> Payload:
        """Return this rank's part of a version; the first rank's includes the extras."""
        position = {tensor.name: i for i, tensor in enumerate(self._holding.tensors)}
        written = joined.holdings.ranks[self._rank]
        tensors = [payload.tensors[position[tensor.name]] for tensor in written.tensors]
        layout = file_layout(written)
        extras = payload.layout.specs[len(self._holding.tensors) :]
        if extras and not self._rank:
            specs = [(s.name, s.dtype, s.shape) for s in (*layout.specs, *extras)]
            layout = Layout.of_kinds(specs)
            tensors += payload.tensors[len(self._holding.tensors) :]
        return Payload(payload.version, layout, tensors, packing=payload.packing)


def write_ranks(ranks: Collection[int]) -> str:
    """Write ranks as text.

    Example:
        >>> write_ranks([1, 3])
        'ranks 1 and 3'
    """
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}" if names else "no rank"
