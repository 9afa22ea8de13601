"""A worker on this machine: when it gets a version, which it reads where that was packed."""

from __future__ import annotations

from sync_core.transports import SharedSlots, Slot
from sync_plugin_dist.stream_owner import DistPeer, StreamOwner


class LocalReaders:
    """Shows one worker after the other the slots of the sender.

    Nothing is on its way, so nothing has to begin again: what a worker was shown stays lent until
    the worker says that it reads it no more, or hangs up. The publisher's lock is held during
    every call.
    """

    def __init__(self, office: StreamOwner, slots: SharedSlots) -> None:
        self._office = office
        self._slots = slots
        # Lent, and not packed entirely.
        self._promised: tuple[DistPeer, Slot] | None = None

    def wait(self, peer: DistPeer) -> None:
        """The worker waits for a version that it has not seen."""
        peer.waits = True
        if self._office.publisher.newest(peer.id) > peer.seen:
            self.ask(peer)

    def enough(self, peer: DistPeer) -> None:
        """The worker waits no more; what it was shown meanwhile is its reply."""
        if peer.waits:
            peer.waits = False
            self._office.tell(peer, {"type": "nothing"})

    def ask(self, peer: DistPeer) -> None:
        """The worker waits for the newest version."""
        peer.waits = False
        publisher = self._office.publisher
        slot = publisher.lend(peer.id, peer.seen, peer, peer.name)
        if slot is None:
            self._office.tell(peer, {"type": "nothing"})
            return
        self._promised = peer, slot
        self.pump()

    def left(self, peer: DistPeer) -> None:
        """The worker is not served any more."""
        if self._promised is None or self._promised[0] is not peer:
            return
        self._office.publisher.take_back(*self._promised)
        self._promised = None

    def pump(self) -> None:
        """Show what was packed in the meantime."""
        if self._promised is None:
            return
        peer, slot = self._promised
        if self._office.packed(slot) < slot.nbytes:
            return
        self._promised = None
        news = self._slots.news(peer.knows, slot, self._office.publisher.slots)
        if news is None or self._office.tell(peer, *news):
            peer.seen = slot.version
            self._office.tell(
                peer,
                {
                    "type": "here",
                    "slot": slot.index,
                    "version": slot.version,
                    "digest": slot.digest,
                },
            )

    def revoke(self) -> None:
        """Give up a version that was not packed entirely, and that the worker does not get."""
        if self._promised is None:
            return
        peer, slot = self._promised
        if self._office.publisher.newest(peer.id) == slot.version:
            return
        self._promised = None
        self._office.publisher.take_back(peer, slot)
        self.ask(peer)

    def close(self) -> None:
        """Promise nothing more."""
        self._promised = None
