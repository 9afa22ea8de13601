"""The slots of versions: their readers, and the workers that still wait for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sync_core import Answer, Delivery, Payload
from sync_core.errors import (
    CapacityError,
    ClosedError,
    OptionError,
    WorkerError,
    WorkerLostError,
)
from sync_core.transports import Block, Notice, unheard, uninterrupted

# The newest version, the one that is being written, and one that is still read.
_USUAL = 3


@dataclass(eq=False)
class Slot:
    """Memory for one version.

    Args:
        index: its number, never used for another slot.
        block: the memory.
        version: the version that lies in it; 0 for none.
        digest: the digest of that version's layout.
        readers: its present readers, and their names for messages.
    """

    index: int
    block: Block
    version: int = 0
    digest: str = ""
    nbytes: int = 0
    readers: dict[object, str] = field(default_factory=dict)


@dataclass(eq=False)
class _Place:
    wanted: Slot | None = None
    delivery: Delivery | None = None
    reader: object = None
    wake: Callable[[], None] | None = None
    lost: str | None = None


class Publisher:
    """The slots and the workers of one sender; every method may be called from any thread.

    A slot that has readers is never written to. A slot that a worker may yet ask for is
    written to only when there is no other, and no more can be made.

    Args:
        allocate: makes a block of at least so many bytes.
        nbytes: the size of a payload.
        limit: how many slots there may be at a time. None: three, and more only while all of
            them are read or hold what a worker may yet ask for; at most two for each worker (the
            version that it has, and one in which it got stuck), unless more are read, and one to
            write to.
        worker_ids: the workers.
        timeout: how long `publish` waits for a slot, in seconds.
        views: whether readers keep what they read until they have a newer one, so that
            waiting for them is useless; otherwise an eighth of the timeout is waited before there
            are more slots than three.
        revoke: takes back what was lent and is not read yet, when no slot is free.
        notify: see `TransportContext`.

    Raises:
        OptionError: a limit that leaves no slot.
    """

    def __init__(
        self,
        allocate: Callable[[int], Block],
        nbytes: int,
        limit: int | None,
        worker_ids: Sequence[int],
        *,
        timeout: float,
        views: bool = False,
        revoke: Callable[[], None] = lambda: None,
        notify: Callable[[int, Notice], None] = unheard,
    ) -> None:
        if limit is not None and limit < 1:
            raise OptionError(
                f"slots={limit} has no room for a version; give 1 or more, or leave it out"
            )
        # `with` takes the lock and not the condition, whose `__enter__` is written in Python:
        # Ctrl-C inside of that would leave the lock taken for good.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        # Holds something when a slot may have become free. Ctrl-C in `Condition.wait` may leave the
        # lock to others, so `reserve` waits without it.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._short_of_slots = False
        self.closed = False
        self.slots: list[Slot] = []
        self._allocate = allocate
        self._revoke = revoke
        self._notify = notify
        self._limit = limit
        self._timeout = timeout
        self._patience = 0.0 if views else timeout / 8
        self._places = {worker_id: _Place() for worker_id in worker_ids}
        self._newest_for_all: Slot | None = None
        self._reserved: Slot | None = None
        self._made = 0
        # Two: one that late workers may still ask for, one to write the next version to. A rank
        # that has no workers sends nothing.
        for _ in range(min(2, _USUAL if limit is None else limit) if worker_ids else 0):
            self._add_slot(nbytes)

    def publish(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Pack a payload into a free slot and make it the one that these workers want.

        Raises:
            CapacityError: every slot had a reader until the deadline.
        """
        slot = self.reserve(payload.layout.nbytes, worker_ids)
        payload.pack(slot.block)
        return self.announce(slot, payload, worker_ids)

    def announce(
        self, slot: Slot, payload: Payload, worker_ids: Sequence[int]
    ) -> dict[int, Delivery]:
        """Make a slot that was reserved the one that these workers want.

        A caller that lends it before all of the payload is packed ensures that they do not
        read ahead of that.
        """
        version, nbytes = payload.version, payload.layout.nbytes
        deliveries: dict[int, Delivery] = {}
        with self.lock:
            slot.version, slot.digest, slot.nbytes = version, payload.layout.digest, nbytes
            self._reserved = None
            for worker_id in worker_ids:
                delivery = deliveries[worker_id] = Delivery(worker_id, version, nbytes)
                place = self._places.get(worker_id)
                if place is None:
                    delivery.fail(WorkerError(worker_id, "was removed from the sender"))
                    continue
                place.wanted, place.delivery = slot, delivery
                if place.lost is not None:
                    delivery.fail(WorkerLostError(worker_id, place.lost))
                if place.wake is not None:
                    place.wake()
            # Another thread may have removed some of them meanwhile.
            if deliveries.keys() >= self._places.keys():
                self._newest_for_all = slot
        return deliveries

    def expect(self, worker_ids: Sequence[int]) -> None:
        """Count these workers as reachable again: they may get later versions."""
        with self.lock:
            for worker_id in worker_ids:
                if worker_id in self._places:
                    self._places[worker_id].lost = None

    def retract(self, slot: Slot) -> None:
        """Withdraw a version that was announced, and whose packing was interrupted.

        A reader that was shown the slot may still read it, so the slot is not written to until
        that reader releases it. ``revoke`` takes it back from the readers that were not shown it.
        """
        with self.lock, uninterrupted():
            self._forget(slot)
            self._revoke()
            self._freed()

    def newest(self, worker_id: int) -> int:
        """The version that the worker wants; 0 for none."""
        with self.lock:
            place = self._places.get(worker_id)
            return 0 if place is None or place.wanted is None else place.wanted.version

    def lend(self, worker_id: int, seen: int, reader: object, name: str) -> Slot | None:
        """The slot that the worker wants, unless it has seen that version; it is read from now."""
        with self.lock:
            place = self._places.get(worker_id)
            if place is None or place.wanted is None or place.wanted.version <= seen:
                return None
            place.wanted.readers[reader] = name
            return place.wanted

    def give_back(
        self, reader: object, kept: Sequence[int] = (), *, until: int | None = None
    ) -> None:
        """The reader reads only the slots ``kept`` from now on.

        Args:
            reader: the reader.
            kept: the indices of these slots.
            until: the newest version of which it says this; it may read newer ones. None: all.
        """
        with self.lock:
            freed = False
            for slot in self.slots:
                if until is not None and slot.version > until:
                    continue
                if slot.readers and slot.index not in kept:
                    freed |= slot.readers.pop(reader, None) is not None
            if freed and (self._short_of_slots or len(self.slots) > _USUAL):
                self._freed()

    def take_back(self, reader: object, slot: Slot) -> None:
        """The reader has not begun to read the slot, and will not."""
        with self.lock:
            if slot.readers.pop(reader, None) is not None:
                self._freed()

    def answer(self, worker_id: int, answer: Answer, reader: object) -> None:
        """The worker has committed a version, or could not.

        Unless another reader has taken its place: that one has not committed anything by this.
        """
        with self.lock:
            place = self._places.get(worker_id)
            if place is None or place.reader is not reader:
                return
            if place.delivery is not None and place.delivery.version == answer.version:
                place.delivery.acknowledge(answer)
            elif answer.error is None:
                self._notify(worker_id, Notice("acknowledged", answer.version))

    def joined(
        self, worker_id: int, reader: object, wake: Callable[[], None] | None = None
    ) -> bool:
        """Record that a worker has connected as ``reader``; return False for an unknown worker.

        Args:
            worker_id: the worker.
            reader: stands for its receiver.
            wake: called, with the lock held, when there is a version for it, or nothing more.
        """
        with self.lock:
            place = self._places.get(worker_id)
            if place is None:
                return False
            replaced = place.wake
            place.reader, place.wake, place.lost = reader, wake, None
            self._notify(worker_id, Notice("connected"))
            if replaced is not None:
                replaced()
            return True

    def dismissed(self, worker_id: int, reader: object) -> str | None:
        """Return why there is nothing more for a reader; None while it is the worker's."""
        with self.lock:
            place = self._places.get(worker_id)
            if self.closed:
                return "the sender was closed"
            if place is None or place.reader is None:
                return f"worker {worker_id} was removed from the sender"
            if place.reader is not reader:
                return "another receiver was given the same address"
            return None

    def remark(self, worker_id: int, remark: str) -> None:
        """Say more of the worker, should it not confirm what it was sent last."""
        with self.lock:
            place = self._places.get(worker_id)
            if place is not None and place.delivery is not None:
                place.delivery.remark = remark

    def lost(self, worker_id: int, reader: object, reason: str) -> None:
        """The worker is gone: what it has not confirmed has failed, and so will what is sent.

        Unless another reader has taken its place meanwhile.
        """
        with self.lock:
            self.give_back(reader)
            place = self._places.get(worker_id)
            if place is None or place.reader is not reader:
                return
            place.lost = reason
            self._notify(worker_id, Notice("lost", reason=reason))
            if place.delivery is not None:
                place.delivery.fail(WorkerLostError(worker_id, reason))

    def add_worker(self, worker_id: int) -> None:
        """Serve one more worker; it wants the newest version that went to all."""
        with self.lock:
            self._places[worker_id] = _Place(wanted=self._newest_for_all)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        with self.lock:
            place = self._places.pop(worker_id)
            if place.delivery is not None:
                place.delivery.fail(WorkerError(worker_id, "was removed from the sender"))
            if place.wake is not None:
                place.wake()
            self._tell_changed()

    def close(self) -> None:
        """Fail pending deliveries, release the memory, and wake waiting threads."""
        with self.lock:
            self.closed = True
            for worker_id, place in self._places.items():
                place.wanted = None
                if place.delivery is not None:
                    place.delivery.fail(WorkerError(worker_id, "the sender was closed"))
                if place.wake is not None:
                    place.wake()
            self._newest_for_all = None
            self.slots.clear()
            self._tell_changed()

    def reserve(self, nbytes: int, worker_ids: Sequence[int]) -> Slot:
        """Return a slot without readers, with room for ``nbytes``, for these workers' version.

        Raises:
            CapacityError: every slot had a reader until the deadline.
        """
        started = time.monotonic()
        shortage: CapacityError | None = None
        self._short_of_slots = False
        while True:
            with self.lock:
                if self.closed:
                    raise ClosedError("the sender is closed")
                self._reserved = None
                slot = self._free_slot(nbytes, worker_ids)
                if slot is None:
                    with uninterrupted():
                        self._revoke()
                    slot = self._free_slot(nbytes, worker_ids)
                waited = time.monotonic() - started
                patient = waited < self._patience
                if slot is None and not patient and len(self.slots) < self._most():
                    try:
                        slot = self._add_slot(nbytes)
                    except CapacityError as error:
                        shortage = error  # one may still be released
                if slot is not None:
                    slot.version, self._reserved = 0, slot
                    return slot
                if waited > self._timeout:
                    raise CapacityError(self._all_taken()) from shortage
                self._short_of_slots = True
                while not self._news.empty():
                    self._news.get()
            with suppress(queue.Empty):
                self._news.get(
                    timeout=max(0.0, (self._patience if patient else self._timeout) - waited)
                )

    def _free_slot(self, nbytes: int, worker_ids: Sequence[int]) -> Slot | None:
        unwanted = self._unwanted()
        for slot in unwanted:
            if slot.block.nbytes >= nbytes:
                return slot
        if unwanted:
            self.slots.remove(unwanted[0])
        if unwanted or len(self.slots) < min(_USUAL, self._most()):
            return self._add_slot(nbytes)
        free = [slot for slot in self.slots if not slot.readers]
        if not free:
            return None
        replaced = self._replaced_by_what_goes_to(worker_ids)
        spare = [slot for slot in free if slot in replaced]
        if not spare and len(self.slots) < self._most():
            # Where there is no memory for it, a late worker does not get it.
            with suppress(CapacityError):
                return self._add_slot(nbytes)
        oldest = min(spare or free, key=lambda slot: slot.version)
        self._forget(oldest)
        if oldest.block.nbytes >= nbytes:
            return oldest
        self.slots.remove(oldest)
        return self._add_slot(nbytes)

    def _unwanted(self) -> list[Slot]:
        """The slots without readers or writer, which no worker may still ask for."""
        wanted = {self._newest_for_all, self._reserved}
        for place in self._places.values():
            wanted.add(place.wanted)
        return [slot for slot in self.slots if not slot.readers and slot not in wanted]

    def _replaced_by_what_goes_to(self, worker_ids: Sequence[int]) -> list[Slot]:
        """The slots that no worker may ask for any more once these have a newer version."""
        kept = {place.wanted for i, place in self._places.items() if i not in worker_ids}
        if kept:
            kept.add(self._newest_for_all)
        return [slot for slot in self.slots if slot not in kept]

    def _most(self) -> int:
        """Return how many slots there may be at a time."""
        if self._limit is not None:
            return self._limit
        read = sum(bool(slot.readers) for slot in self.slots)
        return max(_USUAL, 2 * len(self._places) + 1, read + 1)

    def _freed(self) -> None:
        """A slot was released: free those beyond the usual number, but for a spare."""
        if self._limit is None and len(self.slots) > _USUAL:
            for slot in self._unwanted()[1:]:
                if len(self.slots) > _USUAL:
                    self.slots.remove(slot)
        self._tell_changed()

    def _tell_changed(self) -> None:
        self.changed.notify_all()
        if self._news.empty():
            self._news.put(None)

    def _forget(self, slot: Slot) -> None:
        for place in self._places.values():
            if place.wanted is slot:
                place.wanted = None
        if self._newest_for_all is slot:
            self._newest_for_all = None

    def _add_slot(self, nbytes: int) -> Slot:
        self._made += 1
        slot = Slot(self._made, self._allocate(nbytes))
        self.slots.append(slot)
        return slot

    def _all_taken(self) -> str:
        readers = sorted({name for slot in self.slots for name in slot.readers.values()})
        remedy = (
            "no more can be made; " if self._limit is None else "give the scheme more slots=, or "
        )
        return (
            f"no slot became free within {self._timeout:g} s: {', '.join(readers)} read all "
            f"{len(self.slots)} of them; {remedy}let them call receive()"
        )
