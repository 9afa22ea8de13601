"""The wire of a lane: all its ends have to come together, and it may be given up at any time."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from sync_core.transports import Message
from sync_plugin_dist.descriptors import advice, enough_descriptors
from sync_plugin_dist.office import DistPeer, Office
from sync_plugin_dist.rendezvous import BrokenWireError, Rendezvous
from sync_plugin_dist.wire import Wire

_log = logging.getLogger("sync_core")
# How often a process without descriptors looks whether it has some, in seconds.
_PAUSE = 0.05
# gloo has each end tell one.
_MAX_KEYS = 8


class Junction:
    """At most one wire at a time. The publisher's lock is held during every call.

    Args:
        office: the sender.
        opened: called when the wire is there, or could not be made, unless it was given up.
    """

    def __init__(self, office: Office, opened: Callable[[], None]) -> None:
        self._office = office
        self._opened = opened
        self._rendezvous: Rendezvous | None = None
        self._told: Counter[DistPeer] = Counter()
        #: The number of the wire that is there, or is being made; 0 for none.
        self.number = 0
        #: Who is at its other ends.
        self.members: tuple[DistPeer, ...] = ()
        #: The wire, once it is there.
        self.wire: Wire | None = None

    @property
    def connecting(self) -> bool:
        """Whether a wire is being made."""
        return self._rendezvous is not None

    def connect(self, members: tuple[DistPeer, ...]) -> None:
        """Make a wire to these workers, in place of the one that there is."""
        self.end()
        number = self._office.next_number()
        rendezvous = Rendezvous(
            number,
            self._tell,
            lambda seconds: self._wait(number, seconds),
            timeout=self._office.timeout,
            lock=self._office.publisher.lock,
        )
        self.number, self.members, self._rendezvous = number, members, rendezvous
        size = len(members) + 1
        for rank, peer in enumerate(members, 1):
            invitation = {"type": "wire", "number": number, "rank": rank, "size": size}
            self._office.tell(peer, invitation)
            if self.number != number:
                return  # that one is gone, and so is this wire
        threading.Thread(
            target=self._open, args=(rendezvous, size), name="sync-dist-connect", daemon=True
        ).start()

    def hear(self, peer: DistPeer, message: Message) -> None:
        """A worker tells a key, which is for the others too.

        Raises:
            ValueError: it is none.
        """
        if message["number"] != self.number or peer not in self.members:
            return
        self._told[peer] += 1
        if self._told[peer] > _MAX_KEYS:
            raise ValueError("it tells more keys than any wire has")
        if self._rendezvous is not None:
            self._rendezvous.put(message)
            self._office.publisher.changed.notify_all()
        self._tell(message, peer)

    def drop(self, peer: DistPeer) -> None:
        """The worker is gone, and the wire of no use to the others."""
        self.members = tuple(member for member in self.members if member is not peer)

    def end(self) -> None:
        """Close the wire, or give up making it."""
        self.number, self.members, self._rendezvous = 0, (), None
        self._told.clear()
        self._office.publisher.changed.notify_all()
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def _tell(self, message: Message, teller: DistPeer | None = None) -> None:
        with self._office.publisher.lock:
            for peer in self.members:
                if message["number"] != self.number:
                    return
                if peer is not teller:
                    self._office.tell(peer, message)

    def _wait(self, number: int, seconds: float) -> None:
        if self.number != number:
            raise BrokenWireError("it was given up")
        self._office.publisher.changed.wait(seconds)

    def _open(self, rendezvous: Rendezvous, size: int) -> None:
        if not enough_descriptors(size):
            _log.warning(advice(size))
        while not enough_descriptors(size):
            # Until the workers give it up, at the latest.
            if rendezvous is not self._rendezvous:
                return
            time.sleep(_PAUSE)
        try:
            wire = self._office.open_wire(rendezvous, size)
        except BrokenWireError:
            wire = None
        with self._office.publisher.lock:
            if rendezvous is self._rendezvous:
                self._rendezvous, self.wire = None, wire
                self._opened()
                return
        if wire is not None:
            wire.close()
