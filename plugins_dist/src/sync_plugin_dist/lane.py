"""Workers that are served at once: when they get a version, and what if one fails meanwhile."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sync_core import Message, Peer, Publisher, Slot
from sync_plugin_dist.parts import cut
from sync_plugin_dist.wire import BrokenWireError, Wire


@dataclass(eq=False)
class DistPeer(Peer):
    """A worker that receives over a wire.

    Args:
        lane: where it is served, once it is known who it is.
        offered: the newest version that it was told of.
    """

    lane: Lane | None = field(default=None, repr=False)
    offered: int = 0


class Office(ABC):
    """What a lane needs of its sender."""

    publisher: Publisher
    part_nbytes: int
    #: Whether a lane has one wire for several workers.
    collective: bool
    #: How long workers wait for those that are late, and for a transfer that does not get on.
    patience: float

    @abstractmethod
    def tell(self, peer: DistPeer, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; False when the worker is gone."""

    @abstractmethod
    def offer(self, peer: DistPeer) -> None:
        """Tell the worker of the newest version, if it has not seen that."""

    @abstractmethod
    def packed(self, slot: Slot) -> int:
        """How many bytes of the slot may be sent already."""

    @abstractmethod
    def next_number(self) -> int:
        """A number for a wire."""

    @abstractmethod
    def open_wire(self, number: int, size: int) -> Wire:
        """The sender's end of a wire; blocks until the other ends are there."""

    @abstractmethod
    def expected(self) -> set[int]:
        """The workers that are connected, and have not the newest version meant for them."""


@dataclass(eq=False)
class _Transfer:
    """A version on its way to the members of a lane.

    Args:
        slot: where it lies.
        parts: as it is sent.
        sent: how many of the parts were given to the wire.
        missing: who has not received all of it.
        reached: how far it had got when that was last looked at.
    """

    slot: Slot
    parts: list[Tensor]
    missing: set[DistPeer]
    sent: int = 0
    bytes_sent: int = 0
    reached: tuple[int, ...] = ()


class Lane:
    """Serves one worker, or all of a collective, over one wire.

    It waits until those who shall get a version ask for it, makes a wire to just them unless it
    has that already, and sends. Whatever fails meanwhile ends the wire; those that have not got
    the version are asked to begin again, and get it over a new wire, without the one that is gone
    or does not move. The publisher's lock is held during every call.
    """

    def __init__(self, office: Office) -> None:
        self._office = office
        self._asking: dict[DistPeer, None] = {}
        self._members: tuple[DistPeer, ...] = ()
        self._wire: Wire | None = None
        self._number = 0
        self._connecting = False
        self._transfer: _Transfer | None = None
        self._timer: threading.Timer | None = None
        self._waited_enough = False

    def ask(self, peer: DistPeer) -> None:
        """The worker waits for the newest version."""
        if self._transfer is not None and peer in self._transfer.missing:
            return  # it had asked already, before it was told to begin again
        self._asking[peer] = None
        self._advance()

    def received(self, peer: DistPeer) -> None:
        """The worker has all that it was sent."""
        transfer = self._transfer
        if transfer is None or peer not in transfer.missing:
            return
        transfer.missing.discard(peer)
        if not transfer.missing:
            self._finish()

    def broken(self, number: int) -> None:
        """A worker found that the wire does not work."""
        if number == self._number:
            self._begin_again()

    def left(self, peer: DistPeer) -> None:
        """The worker is not served any more."""
        self._asking.pop(peer, None)
        if peer in self._members:
            self._members = tuple(member for member in self._members if member is not peer)
            self._begin_again()
        elif self._asking:
            self._advance()

    def pump(self) -> None:
        """Send what was packed in the meantime."""
        transfer, wire = self._transfer, self._wire
        if transfer is None or wire is None:
            return
        ready = self._office.packed(transfer.slot)
        try:
            while transfer.sent < len(transfer.parts):
                part = transfer.parts[transfer.sent]
                if transfer.bytes_sent + part.nbytes > ready:
                    return
                wire.send(part)
                transfer.sent += 1
                transfer.bytes_sent += part.nbytes
                if transfer.sent == len(transfer.parts):
                    wire.finish(transfer.slot.version)
        except RuntimeError:
            self._begin_again()

    def revoke(self) -> None:
        """Give up sending a version in whose place there is another one, or none."""
        transfer = self._transfer
        if transfer is None:
            return
        wanted = set(map(self._office.publisher.newest, map(_id, transfer.missing)))
        if not transfer.slot.version or transfer.slot.version not in wanted:
            self._begin_again()

    def close(self) -> None:
        """Give up what is under way."""
        self._stop_timer()
        self._end_wire()
        self._asking.clear()
        self._transfer = None
        self._number = 0

    def _advance(self) -> None:
        if self._connecting or self._transfer is not None:
            return
        publisher = self._office.publisher
        for peer in tuple(self._asking):
            if publisher.newest(_id(peer)) <= peer.seen:
                del self._asking[peer]
                self._office.tell(peer, {"type": "nothing"})
        if not self._asking or self._must_wait():
            return
        version = publisher.newest(_id(next(iter(self._asking))))
        members = tuple(
            sorted((p for p in self._asking if publisher.newest(_id(p)) == version), key=_id)
        )
        if self._wire is not None and members == self._members:
            self._start(members)
        else:
            self._connect(members)

    def _must_wait(self) -> bool:
        if not self._office.collective or self._waited_enough:
            return False
        if self._office.expected() <= {_id(peer) for peer in self._asking}:
            return False
        if self._timer is None:
            self._start_timer(self._stop_waiting)
        return True

    def _stop_waiting(self) -> None:
        self._waited_enough = True
        self._advance()

    def _connect(self, members: tuple[DistPeer, ...]) -> None:
        self._stop_timer()
        self._end_wire()
        self._members, self._connecting = members, True
        self._number = number = self._office.next_number()
        size = len(members) + 1
        for rank, peer in enumerate(members, 1):
            invitation = {"type": "wire", "number": number, "rank": rank, "size": size}
            self._office.tell(peer, invitation)
            if self._number != number:
                return  # that one is gone, and so is this wire
        threading.Thread(
            target=self._open, args=(number, size), name="sync-dist-connect", daemon=True
        ).start()

    def _open(self, number: int, size: int) -> None:
        try:
            wire = self._office.open_wire(number, size)
        except BrokenWireError:
            wire = None
        with self._office.publisher.changed:
            if number == self._number:
                self._connecting, self._wire = False, wire
                if wire is None:
                    self._begin_again()
                else:
                    self._advance()
                return
        if wire is not None:
            wire.close()

    def _start(self, members: tuple[DistPeer, ...]) -> None:
        self._stop_timer()
        self._waited_enough = False
        assert self._wire is not None
        publisher, slot = self._office.publisher, None
        for peer in members:
            slot = publisher.lend(_id(peer), peer.seen, peer, peer.name)
            del self._asking[peer]
        assert slot is not None
        parts = cut(slot.block, slot.nbytes, self._office.part_nbytes)
        transfer = self._transfer = _Transfer(slot, parts, set(members))
        for peer in members:
            self._office.tell(
                peer,
                {
                    "type": "data",
                    "number": self._number,
                    "version": slot.version,
                    "digest": slot.digest,
                    "nbytes": slot.nbytes,
                    "part": self._office.part_nbytes,
                },
            )
            if self._transfer is not transfer:
                return  # that one is gone, and the others begin again
        if self._office.collective:
            self._start_timer(self._look_after)
        self.pump()

    def _look_after(self) -> None:
        """Begin again when a transfer has not got on since the last time."""
        transfer, wire = self._transfer, self._wire
        if transfer is None or wire is None:
            return
        reached = (transfer.sent, wire.progress(), -len(transfer.missing))
        if reached == transfer.reached:
            self._begin_again()
            return
        transfer.reached = reached
        self._start_timer(self._look_after)

    def _finish(self) -> None:
        assert self._wire is not None
        self._stop_timer()
        self._transfer = None
        try:
            self._wire.settle()
        except BrokenWireError:
            self._end_wire()
        self._advance()

    def _begin_again(self) -> None:
        self._stop_timer()
        transfer, self._transfer = self._transfer, None
        members, self._members = self._members, ()
        self._number = 0
        self._end_wire()
        self._waited_enough = False
        # Another may be found gone meanwhile; nothing is to begin before all have been told.
        self._connecting = True
        for peer in members:
            if transfer is not None:
                self._office.publisher.take_back(peer, transfer.slot)
            self._asking.pop(peer, None)
            if self._office.tell(peer, {"type": "again"}):
                peer.offered = 0
                self._office.offer(peer)
        self._connecting = False
        self._advance()

    def _end_wire(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _start_timer(self, action: Callable[[], None]) -> None:
        timer = threading.Timer(self._office.patience, lambda: self._ring(timer, action))
        timer.daemon = True
        self._timer = timer
        timer.start()

    def _ring(self, timer: threading.Timer, action: Callable[[], None]) -> None:
        with self._office.publisher.changed:
            if self._timer is timer:
                self._timer = None
                action()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _id(peer: DistPeer) -> int:
    assert peer.worker_id is not None
    return peer.worker_id
