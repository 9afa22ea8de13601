"""The slots of versions: their readers, and the workers that still wait for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sync_core import Answer, Delivery, Payload
from sync_core.errors import CapacityError, ClosedError, OptionError
from sync_core.transports import Block, Notice, Publication, Roster, unheard, uninterrupted

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
        publication: stands for that version in the roster; None while there is none.
    """

    index: int
    block: Block
    version: int = 0
    digest: str = ""
    nbytes: int = 0
    readers: dict[object, str] = field(default_factory=dict)
    publication: Publication | None = None


class Publisher:
    """The slots of one sender and their readers; every method may be called from any thread.

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
        #: The workers, and the version that each of them wants.
        self.roster = Roster(worker_ids, notify)
        # How each worker that is connected is notified.
        self._wakes: dict[int, Callable[[], None]] = {}
        self._limit = limit
        self._timeout = timeout
        self._patience = 0.0 if views else timeout / 8
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
        with self.lock:
            slot.version, slot.digest, slot.nbytes = version, payload.layout.digest, nbytes
            slot.publication = Publication(version, nbytes)
            self._reserved = None
            deliveries = self.roster.publish(slot.publication, worker_ids)
            for worker_id in worker_ids:
                if worker_id in self._wakes:
                    self._wakes[worker_id]()
        return deliveries

    def expect(self, worker_ids: Sequence[int]) -> None:
        """Count these workers as reachable again: they may get later versions."""
        self.roster.expect(worker_ids)

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
        wanted = self.roster.wanted(worker_id)
        return 0 if wanted is None else wanted.version

    def lend(self, worker_id: int, seen: int, reader: object, name: str) -> Slot | None:
        """The slot that the worker wants, unless it has seen that version; it is read from now."""
        with self.lock:
            wanted = self.roster.wanted(worker_id, after=seen)
            # Not the publication's content: what refers to itself is freed late.
            for slot in self.slots if wanted is not None else ():
                if slot.publication is wanted:
                    slot.readers[reader] = name
                    return slot
            return None

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
        """The worker has committed a version, or could not; see `Roster.answered`."""
        self.roster.answered(worker_id, reader, answer)

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
            if not self.roster.connected(worker_id, reader):
                return False
            replaced = self._wakes.pop(worker_id, None)
            if wake is not None:
                self._wakes[worker_id] = wake
            if replaced is not None:
                replaced()
            return True

    def dismissed(self, worker_id: int, reader: object) -> str | None:
        """Return why there is nothing more for a reader; None while it is the worker's."""
        return self.roster.dismissed(worker_id, reader)

    def remark(self, worker_id: int, remark: str) -> None:
        """Say more of the worker, should it not confirm what it was sent last."""
        self.roster.remark(worker_id, remark)

    def lost(self, worker_id: int, reader: object, reason: str) -> None:
        """The worker is gone, and reads nothing any more; see `Roster.lost`."""
        with self.lock:
            self.give_back(reader)
            self.roster.lost(worker_id, reader, reason)

    def add_worker(self, worker_id: int) -> None:
        """Serve one more worker; it wants the newest version that went to all."""
        self.roster.add(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        with self.lock:
            self.roster.remove(worker_id)
            wake = self._wakes.pop(worker_id, None)
            if wake is not None:
                wake()
            self._tell_changed()

    def close(self) -> None:
        """Fail pending deliveries, release the memory, and wake waiting threads."""
        with self.lock:
            self.closed = True
            self.roster.close()
            for wake in self._wakes.values():
                wake()
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
                    slot.version, slot.publication, self._reserved = 0, None, slot
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
        owed = self.roster.owed()
        return [
            slot
            for slot in self.slots
            if not slot.readers and slot is not self._reserved and slot.publication not in owed
        ]

    def _replaced_by_what_goes_to(self, worker_ids: Sequence[int]) -> list[Slot]:
        """The slots that no worker may ask for any more once these have a newer version."""
        owed = self.roster.owed(besides=worker_ids)
        return [slot for slot in self.slots if slot.publication not in owed]

    def _most(self) -> int:
        """Return how many slots there may be at a time."""
        if self._limit is not None:
            return self._limit
        read = sum(bool(slot.readers) for slot in self.slots)
        return max(_USUAL, 2 * len(self.roster.worker_ids) + 1, read + 1)

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
        if slot.publication is not None:
            self.roster.withdraw(slot.publication)

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
