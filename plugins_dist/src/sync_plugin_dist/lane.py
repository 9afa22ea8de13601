"""Workers that are served at once: when they get a version, and what if one fails meanwhile."""

from __future__ import annotations

from sync_core.transports import Message
from sync_plugin_dist.junction import Junction
from sync_plugin_dist.office import DistPeer, Office
from sync_plugin_dist.parts import cut
from sync_plugin_dist.rendezvous import BrokenWireError
from sync_plugin_dist.shipment import Shipment
from sync_plugin_dist.timer import LockedTimer


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
        self._junction = Junction(office, self._opened)
        self._shipment: Shipment | None = None
        self._timer = LockedTimer(office.publisher.lock, office.patience)
        self._waited_enough = False
        self._beginning_again = False

    def ask(self, peer: DistPeer) -> None:
        """The worker waits for the newest version."""
        if self._shipment is not None and peer in self._shipment.missing:
            return  # it had asked already, before it was told to begin again
        self._asking[peer] = None
        self._advance()

    def hear(self, peer: DistPeer, message: Message) -> None:
        """The worker tells the other ends of the wire how to find it."""
        self._junction.hear(peer, message)

    def received(self, peer: DistPeer) -> None:
        """The worker has all that it was sent."""
        shipment = self._shipment
        if shipment is None or peer not in shipment.missing:
            return
        shipment.missing.discard(peer)
        if not shipment.missing:
            self._finish()

    def broken(self, number: int) -> None:
        """A worker found that the wire does not work."""
        if number == self._junction.number:
            self._begin_again()

    def left(self, peer: DistPeer) -> None:
        """The worker is not served any more."""
        self._asking.pop(peer, None)
        if peer in self._junction.members:
            self._junction.drop(peer)
            self._begin_again()
        elif self._asking:
            self._advance()

    def pump(self) -> None:
        """Send what was packed in the meantime."""
        shipment, wire = self._shipment, self._junction.wire
        if shipment is None or wire is None:
            return
        try:
            shipment.pump(wire, self._office.packed(shipment.slot))
        except RuntimeError:
            self._begin_again()

    def revoke(self) -> None:
        """Give up sending a version in whose place there is another one, or none."""
        shipment = self._shipment
        if shipment is None:
            return
        wanted = {self._office.publisher.newest(peer.id) for peer in shipment.missing}
        if shipment.slot.version not in wanted:
            self._begin_again()

    def close(self) -> None:
        """Give up what is under way."""
        self._timer.stop()
        self._junction.end()
        self._asking.clear()
        self._shipment = None

    def _advance(self) -> None:
        if self._beginning_again or self._junction.connecting or self._shipment is not None:
            return
        publisher = self._office.publisher
        for peer in tuple(self._asking):
            if publisher.newest(peer.id) <= peer.seen:
                del self._asking[peer]
                self._office.tell(peer, {"type": "nothing"})
        if not self._asking or self._must_wait():
            return
        version = publisher.newest(next(iter(self._asking)).id)
        asking = (peer for peer in self._asking if publisher.newest(peer.id) == version)
        members = tuple(sorted(asking, key=lambda peer: peer.id))
        if self._junction.wire is not None and members == self._junction.members:
            self._start(members)
        else:
            self._timer.stop()
            self._junction.connect(members)

    def _must_wait(self) -> bool:
        if not self._office.collective or self._waited_enough:
            return False
        if self._office.expected() <= {peer.id for peer in self._asking}:
            return False
        if not self._timer.running:
            self._timer.start(self._stop_waiting)
        return True

    def _stop_waiting(self) -> None:
        self._waited_enough = True
        asking = sorted(peer.id for peer in self._asking)
        if asking:
            remark = f"the group was made without it, for workers: {', '.join(map(str, asking))}"
            for worker_id in self._office.expected().difference(asking):
                self._office.publisher.remark(worker_id, remark)
        self._advance()

    def _opened(self) -> None:
        if self._junction.wire is None:
            self._begin_again()
        else:
            self._advance()

    def _start(self, members: tuple[DistPeer, ...]) -> None:
        self._timer.stop()
        self._waited_enough = False
        publisher, slot = self._office.publisher, None
        for peer in members:
            slot = publisher.lend(peer.id, peer.seen, peer, peer.name)
            del self._asking[peer]
        assert slot is not None
        parts = cut(slot.block, slot.nbytes, self._office.part_nbytes)
        shipment = self._shipment = Shipment(slot, parts, set(members))
        announcement = shipment.announcement(self._junction.number, self._office.part_nbytes)
        for peer in members:
            self._office.tell(peer, announcement)
            if self._shipment is not shipment:
                return  # that one is gone, and the others begin again
        if self._office.collective:
            self._timer.start(self._look_after)
        self.pump()

    def _look_after(self) -> None:
        """Begin again when a transfer has not got on since the last time."""
        shipment, wire = self._shipment, self._junction.wire
        if shipment is None or wire is None:
            return
        if shipment.gets_on(wire):
            self._timer.start(self._look_after)
        else:
            self._begin_again()

    def _finish(self) -> None:
        assert self._junction.wire is not None
        self._timer.stop()
        self._shipment = None
        try:
            self._junction.wire.settle()
        except BrokenWireError:
            self._junction.end()
        self._advance()

    def _begin_again(self) -> None:
        self._timer.stop()
        shipment, self._shipment = self._shipment, None
        members = self._junction.members
        self._junction.end()
        self._waited_enough = False
        # Another may be found gone meanwhile; nothing is to begin before all have been told.
        self._beginning_again = True
        for peer in members:
            if shipment is not None:
                self._office.publisher.take_back(peer, shipment.slot)
            self._asking.pop(peer, None)
            if self._office.tell(peer, {"type": "again"}):
                peer.offered = 0
                self._office.offer(peer)
        self._beginning_again = False
        self._advance()
