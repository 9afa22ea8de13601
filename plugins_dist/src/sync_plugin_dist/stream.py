"""Send versions to one worker or to a broadcast's workers, and recover from failures."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sync_plugin_dist.chunks import cut
from sync_plugin_dist.descriptors import advice, enough_descriptors
from sync_plugin_dist.process_group import TensorGroup
from sync_plugin_dist.rendezvous import BrokenGroupError, Rendezvous, read_key
from sync_plugin_dist.stream_owner import DistPeer, StreamOwner
from sync_plugin_std.local import Message, Slot


class LockedTimer:
    """A timer with at most one pending action, which it runs under a lock.

    Args:
        lock: held during every call and during the action.
        seconds: the delay of an action.
    """

    def __init__(self, lock: AbstractContextManager[Any], seconds: float) -> None:
        self._lock = lock
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    @property
    def running(self) -> bool:
        """True while an action is pending."""
        return self._timer is not None

    def start(self, action: Callable[[], None]) -> None:
        """Schedule an action."""
        timer = threading.Timer(self._seconds, lambda: self._ring(timer, action))
        timer.daemon = True
        self._timer = timer
        timer.start()

    def stop(self) -> None:
        """Cancel the action, even if its time has come and it is waiting for the lock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self, timer: threading.Timer, action: Callable[[], None]) -> None:
        with self._lock:
            if self._timer is timer:
                self._timer = None
                action()


@dataclass(eq=False)
class ChunkTransfer:
    """The progress of sending one version.

    Args:
        slot: the slot with the version.
        parts: the version's parts.
        missing: the workers that have not received all parts.
    """

    slot: Slot
    parts: list[Tensor]
    missing: set[DistPeer]
    #: Whether the version's hash was sent.
    summed: bool = False
    _sent: int = 0
    _bytes_sent: int = 0
    _reached: tuple[int, ...] = ()

    def announcement(self, number: int, part_nbytes: int) -> Message:
        """Return the message that announces the transfer over the wire with this number."""
        return {
            "type": "data",
            "number": number,
            "version": self.slot.version,
            "digest": self.slot.digest,
            "nbytes": self.slot.nbytes,
            "part": part_nbytes,
        }

    def pump(self, wire: TensorGroup, ready: int) -> None:
        """Send the unsent parts within the first ``ready`` bytes.

        Raises:
            RuntimeError: the process group is broken.
        """
        while self._sent < len(self.parts):
            part = self.parts[self._sent]
            if self._bytes_sent + part.nbytes > ready:
                return
            wire.send(part)
            self._sent += 1
            self._bytes_sent += part.nbytes
            if self._sent == len(self.parts):
                wire.finish(self.slot.version)

    def gets_on(self, wire: TensorGroup) -> bool:
        """Return whether the transfer has progressed since the last call."""
        before = self._reached
        self._reached = (self._sent, wire.progress(), -len(self.missing))
        return self._reached != before


_log = logging.getLogger("sync_core")
# How often a process without free descriptors checks again, in seconds.
_PAUSE = 0.05
# The most keys per member; gloo sends one for each.
_MAX_KEYS = 8
# A group may break by chance, as when a worker dies. After this many, its members are suspects.
_MAX_BROKEN = 2


class StreamConnection:
    """Makes and closes a stream's wire: a process group with workers, at most one at a time.

    Args:
        office: the sender; its publisher's lock is held during calls.
        opened: called when the wire was made or could not be made, unless it was given up.
    """

    def __init__(self, office: StreamOwner, opened: Callable[[], None]) -> None:
        self._office = office
        self._opened = opened
        self._rendezvous: Rendezvous | None = None
        self._told: Counter[DistPeer] = Counter()
        self._keys: set[str] = set()
        self._ranks: dict[DistPeer, int] = {}
        #: The number of the current wire, made or in the making; 0 for none.
        self.number = 0
        #: The workers of the wire.
        self.members: tuple[DistPeer, ...] = ()
        #: The wire, once it is made.
        self.wire: TensorGroup | None = None

    @property
    def connecting(self) -> bool:
        """True while a wire is being made."""
        return self._rendezvous is not None

    def connect(self, members: tuple[DistPeer, ...]) -> None:
        """Make a wire to these workers, instead of the current one."""
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
        self._ranks = {peer: rank for rank, peer in enumerate(members, 1)}
        size = len(members) + 1
        for peer, rank in self._ranks.items():
            invitation = {"type": "wire", "number": number, "rank": rank, "size": size}
            self._office.tell(peer, invitation)
            if self.number != number:
                return  # the worker is gone, and so is this wire
        threading.Thread(
            target=self._open, args=(rendezvous, size), name="sync-dist-connect", daemon=True
        ).start()

    def hear(self, peer: DistPeer, message: Message) -> None:
        """Handle a key from a worker, and pass it to the others.

        Raises:
            ValueError: the key is not valid.
        """
        if message["number"] != self.number or peer not in self.members:
            return
        self._told[peer] += 1
        if self._told[peer] > _MAX_KEYS:
            raise ValueError("it tells more keys than any wire has")
        key, _ = read_key(message)
        # gloo names a key after its sender's rank.
        end = key.rpartition("/")[2]
        if key in self._keys or (end.isdecimal() and int(end) != self._ranks[peer]):
            raise ValueError(f"the key {key!r:.80} is another end's")
        self._keys.add(key)
        if self._rendezvous is not None:
            self._rendezvous.put(message)
            self._office.publisher.changed.notify_all()
        told = {"type": "key", "number": self.number, "key": key, "value": message["value"]}
        self._tell(told, peer)

    def drop(self, peer: DistPeer) -> None:
        """Close the wire, since a worker of it is gone."""
        self.members = tuple(member for member in self.members if member is not peer)

    def end(self) -> None:
        """Close the wire, or stop making it."""
        self.number, self.members, self._rendezvous = 0, (), None
        self._told.clear()
        self._keys.clear()
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
            raise BrokenGroupError("it was given up")
        self._office.publisher.changed.wait(seconds)

    def _open(self, rendezvous: Rendezvous, size: int) -> None:
        if not enough_descriptors(size):
            _log.warning(advice(size))
        while not enough_descriptors(size):
            # At most until the workers give the wire up.
            if rendezvous is not self._rendezvous:
                return
            time.sleep(_PAUSE)
        try:
            wire = self._office.open_wire(rendezvous, size)
        except BrokenGroupError:
            wire = None
        with self._office.publisher.lock:
            if rendezvous is self._rendezvous:
                self._rendezvous, self.wire = None, wire
                self._opened()
                return
        if wire is not None:
            wire.close()


class WorkerStream:
    """Sends versions to one worker, or to all workers of a broadcast, over one wire.

    The stream waits until the workers of a version ask for it, makes a wire to exactly these
    workers, and sends. A failure ends the wire: workers without the version are asked to begin
    again, and get it over a new wire without the worker that is gone or stuck. Any member may have
    broken a wire, and the stream cannot find out which. So after two broken wires, all members are
    suspects: each is served alone, after the others, and rejoins them once it has received a
    version. The publisher's lock is held during every call.
    """

    def __init__(self, office: StreamOwner) -> None:
        self._office = office
        self._asking: dict[DistPeer, None] = {}
        self._junction = StreamConnection(office, self._opened)
        self._shipment: ChunkTransfer | None = None
        self._timer = LockedTimer(office.publisher.lock, office.patience)
        self._waited_enough = False
        self._beginning_again = False
        # The number of broken wires since the last working one, and the members of the last.
        self._broken = 0
        self._suspects: set[int] = set()
        self._connected_at = 0.0

    def ask(self, peer: DistPeer) -> None:
        """Note that a worker waits for the newest version."""
        if self._shipment is not None and peer in self._shipment.missing:
            return  # it had asked before the request to begin again
        self._asking[peer] = None
        self._advance()

    def hear(self, peer: DistPeer, message: Message) -> None:
        """Handle a worker's rendezvous key."""
        self._junction.hear(peer, message)

    def received(self, peer: DistPeer) -> None:
        """Note that a worker has received the version."""
        shipment = self._shipment
        if shipment is None or peer not in shipment.missing:
            return
        shipment.missing.discard(peer)
        if not shipment.missing:
            self._finish()

    def broken(self, number: int) -> None:
        """Handle a worker's report that the wire is broken."""
        if number == self._junction.number:
            self._give_up()

    def given_up(self, peer: DistPeer) -> None:
        """Handle an interrupted worker, which has withdrawn its request and left the wire."""
        self._asking.pop(peer, None)
        if peer in self._junction.members:
            self._give_up()

    def left(self, peer: DistPeer) -> None:
        """Stop serving a worker."""
        self._asking.pop(peer, None)
        if peer in self._junction.members:
            self._count_broken()
            self._junction.drop(peer)
            self._begin_again()
        elif self._asking:
            self._advance()

    def pump(self) -> None:
        """Send the parts that were packed since the last call."""
        shipment, wire = self._shipment, self._junction.wire
        if shipment is None or wire is None:
            return
        try:
            shipment.pump(wire, self._office.packed(shipment.slot))
        except RuntimeError:
            self._give_up()

    def tell_sum(self) -> None:
        """Send the workers the version's hash, once it is known."""
        shipment = self._shipment
        if shipment is None or shipment.summed:
            return
        found = self._office.sum_of(shipment.slot)
        if found is None:
            return
        shipment.summed = True
        version = shipment.slot.version
        message = {"type": "sum", "number": self._junction.number, "version": version, "sum": found}
        for peer in self._junction.members:
            self._office.tell(peer, message)
            if self._shipment is not shipment:
                return  # the worker is gone, and the others begin again

    def revoke(self) -> None:
        """Stop sending a version that was replaced or withdrawn."""
        shipment = self._shipment
        if shipment is None:
            return
        wanted = {self._office.publisher.newest(peer.id) for peer in shipment.missing}
        if shipment.slot.version not in wanted:
            self._begin_again()

    def close(self) -> None:
        """Stop all transfers."""
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
        members = self._next_members()
        if self._junction.wire is not None and members == self._junction.members:
            self._start(members)
        else:
            self._timer.stop()
            self._connected_at = time.monotonic()
            if self._broken or self._suspects:
                self._timer.start(self._stop_connecting)
            self._junction.connect(members)

    def _stop_connecting(self) -> None:
        """Give up making a wire that suspects may be blocking."""
        if self._junction.connecting:
            self._give_up()

    def _next_members(self) -> tuple[DistPeer, ...]:
        """Return the workers to serve next: all that are not suspects, or else one suspect."""
        trusted = [peer for peer in self._asking if peer.id not in self._suspects]
        if not trusted:
            return (next(iter(self._asking)),)
        newest = self._office.publisher.newest
        members = (peer for peer in trusted if newest(peer.id) == newest(trusted[0].id))
        return tuple(sorted(members, key=lambda peer: peer.id))

    def _late(self) -> set[int]:
        """Return the workers of the next group that have not asked yet."""
        asking = {peer.id for peer in self._asking}
        return self._office.expected() - self._suspects - asking

    def _must_wait(self) -> bool:
        if not self._office.collective or self._waited_enough or not self._late():
            return False
        if not self._timer.running:
            self._timer.start(self._stop_waiting)
        return True

    def _stop_waiting(self) -> None:
        self._waited_enough = True
        asking = sorted(peer.id for peer in self._asking)
        if asking:
            remark = f"the group was made without it, for workers: {', '.join(map(str, asking))}"
            for worker_id in self._late():
                self._office.publisher.remark(worker_id, remark)
        self._advance()

    def _opened(self) -> None:
        self._timer.stop()
        if self._junction.wire is None:
            self._give_up()
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
        shipment = self._shipment = ChunkTransfer(slot, parts, set(members))
        announcement = shipment.announcement(self._junction.number, self._office.part_nbytes)
        for peer in members:
            self._office.tell(peer, announcement)
            if self._shipment is not shipment:
                return  # the worker is gone, and the others begin again
        if self._office.collective:
            self._timer.start(self._look_after)
        self.pump()
        self.tell_sum()

    def _look_after(self) -> None:
        """Restart a transfer without progress since the last call."""
        shipment, wire = self._shipment, self._junction.wire
        if shipment is None or wire is None:
            return
        if shipment.gets_on(wire):
            self._timer.start(self._look_after)
        else:
            self._give_up()

    def _finish(self) -> None:
        assert self._junction.wire is not None
        self._timer.stop()
        self._shipment = None
        members = self._junction.members
        self._suspects.difference_update(peer.id for peer in members)
        if len(members) > 1:
            self._broken = 0
        try:
            self._junction.wire.settle()
        except BrokenGroupError:
            self._junction.end()
        self._advance()

    def _give_up(self) -> None:
        """Begin again, since the wire is broken."""
        self._count_broken()
        self._begin_again()

    def _count_broken(self) -> None:
        members = self._junction.members
        if len(members) <= 1:
            return
        self._broken += 1
        waited = time.monotonic() - self._connected_at
        # There is no time before the deadline for another group whose members do not all join.
        silent = self._junction.wire is None and waited >= self._office.patience
        if silent or self._broken >= _MAX_BROKEN:
            self._suspects.update(peer.id for peer in members)

    def _begin_again(self) -> None:
        self._timer.stop()
        shipment, self._shipment = self._shipment, None
        members = self._junction.members
        self._junction.end()
        self._waited_enough = False
        # Another worker may be found dead meanwhile; start nothing before all are notified.
        self._beginning_again = True
        for peer in members:
            if shipment is not None:
                self._office.publisher.take_back(peer, shipment.slot)
            self._asking.pop(peer, None)
            if self._office.tell(peer, {"type": "again"}):
                peer.announced = 0
                self._office.offer_peer(peer)
        self._beginning_again = False
        self._advance()
