"""Random orders of what a transport and its workers tell a roster, held against the promises.

The promises are those of `docs/explanation/protocol.md` that a roster decides: honest answers, an
end, up to date. The model beside the roster remembers every event, and derives the roster's answers
from all events; no event changes a table.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sync_core import Answer, Delivery, WorkerError, WorkerLostError
from sync_core.transports import Notice, Publication, Roster

IDS = (0, 1, 2)
CASES = 10_000


@dataclass(eq=False)
class Sent:
    """A publication, its workers as they were then, and their deliveries."""

    publication: Publication
    workers: tuple[Place, ...]
    to_all: bool
    deliveries: dict[int, Delivery]
    withdrawn: bool = False
    taken_back: bool = False


@dataclass(eq=False)
class Place:
    """One worker, from when it is added until it is removed."""

    worker_id: int
    added_after: int
    readers: list[object] = field(default_factory=list)
    lost: str | None = None

    def heeds(self, reader: object) -> bool:
        """Return whether what the reader says counts; None stands for whichever is the last."""
        return reader is None or reader in self.readers[-1:]


class World:
    """A roster, and what has happened to it."""

    def __init__(self, make: Callable[..., Roster], seed: int) -> None:
        self.random = random.Random(seed)
        self.notices: list[tuple[int, Notice]] = []
        count = self.random.randrange(3)
        self.roster = make(IDS[:count], lambda i, notice: self.notices.append((i, notice)))
        self.places = {i: Place(i, 0) for i in IDS[:count]}
        self.sent: list[Sent] = []
        self.ends: list[tuple[Delivery, Any]] = []
        self.expected: list[tuple[int, Notice]] = []
        self.closed = False

    def owed(self, place: Place) -> Publication | None:
        """Return the newest version for a worker: its own, or the one to all before it came."""
        for sent in reversed(self.sent):
            if place in sent.workers and not sent.taken_back:
                return None if sent.withdrawn else sent.publication
        return self.newest_for_all(place.added_after)

    def newest_for_all(self, until: int) -> Publication | None:
        to_all = [each for each in self.sent[:until] if each.to_all and not each.taken_back]
        return None if not to_all or to_all[-1].withdrawn else to_all[-1].publication

    def last_delivery(self, place: Place) -> Delivery | None:
        own = [sent for sent in self.sent if place in sent.workers]
        return own[-1].deliveries[place.worker_id] if own and not own[-1].taken_back else None

    def step(self) -> None:
        worker_id = self.random.choice(IDS)
        place = self.places.get(worker_id)
        steps = [self.publish, self.answer, self.answer, self.connect, self.lose, self.again]
        steps += [self.fail] if self.random.random() < 0.3 else []
        steps += [self.remark] if self.random.random() < 0.3 else []
        steps += [self.publish_in_vain] if self.random.random() < 0.2 else []
        steps += [self.withdraw] if self.random.random() < 0.2 else []
        steps += [self.close] if self.random.random() < 0.05 else []
        steps += [self.remove if place else self.add] * 2
        if self.closed:
            steps = [self.publish_closed, self.close]
        self.random.choice(steps)(worker_id, place)
        self.check()

    def publish(self, worker_id: int, place: Place | None) -> None:
        addressed = [i for i in IDS if self.random.random() < 0.7]
        if self.random.random() < 0.5:
            addressed = list(self.places)
        if not addressed and self.places:
            return
        publication = Publication(len(self.sent) + 1, 8, object())
        deliveries = self.roster.publish(publication, addressed)
        assert list(deliveries) == addressed
        to_all = self.places.keys() <= deliveries.keys()
        workers = tuple(self.places[i] for i in addressed if i in self.places)
        self.sent.append(Sent(publication, workers, to_all, deliveries))
        for i, delivery in deliveries.items():
            assert (delivery.worker_id, delivery.version, delivery.nbytes) == (
                i,
                publication.version,
                8,
            )
            known = self.places.get(i)
            gone = "was removed from the sender" if known is None else known.lost
            assert delivery.ended is (gone is not None)
            assert gone is None or gone in str(delivery.error)
            delivery.watch(lambda ended, error: self.ends.append((ended, error)))
        self.ends.clear()

    def publish_in_vain(self, worker_id: int, place: Place | None) -> None:
        before, count = self.roster.all_owed(), len(self.sent)
        self.publish(worker_id, place)
        if len(self.sent) == count:
            return
        for _ in range(self.random.randrange(3)):
            changed = self.random.choice(IDS)
            change = self.remove if changed in self.places else self.add
            step = self.random.choice([change, self.answer, self.connect, self.lose])
            step(changed, self.places.get(changed))
        self.roster.withdraw(self.sent[-1].publication, before)
        self.sent[-1].taken_back = True

    def publish_closed(self, worker_id: int, place: Place | None) -> None:
        delivery = self.roster.publish(Publication(99, 8), [worker_id])[worker_id]
        assert "the sender was closed" in str(delivery.error)

    def answer(self, worker_id: int, place: Place | None) -> None:
        version = self.random.randrange(1, len(self.sent) + 2)
        reader = self.reader(place)
        error = "no memory" if self.random.random() < 0.3 else None
        said = Answer(version=version, error=error)
        if self.random.random() < 0.05:
            self.roster.answered(worker_id, reader, {"version": "newest"})
            reason = "does not answer as agreed: an answer cannot have version='newest'"
            self.gone(worker_id, place, reader, reason)
            return
        self.ends.clear()
        owed = self.roster.answered(worker_id, reader, said)
        counts = place is not None and place.heeds(reader)
        wanted = self.roster.wanted(worker_id, after=version)
        assert owed is (wanted if counts else None)
        awaited = self.last_delivery(place) if place is not None else None
        if counts and awaited is not None and awaited.version == version:
            assert [ended for ended, _ in self.ends] == [awaited]
            assert awaited.latest is said
            assert awaited.ended
        else:
            assert self.ends == []
            if counts and error is None:
                self.expected.append((worker_id, Notice("acknowledged", version)))

    def connect(self, worker_id: int, place: Place | None) -> None:
        reader = object()
        assert self.roster.connected(worker_id, reader) is (place is not None)
        if place is not None:
            place.readers.append(reader)
            place.lost = None
            self.expected.append((worker_id, Notice("connected")))

    def reader(self, place: Place | None) -> object:
        """Return the last reader of a worker, or one that it had, or of any, or None."""
        if place is not None and place.readers and self.random.random() < 0.7:
            return place.readers[-1]
        every = [reader for each in self.places.values() for reader in each.readers]
        return self.random.choice([*every, object(), None])

    def lose(self, worker_id: int, place: Place | None) -> None:
        self.roster.lost(worker_id, reader := self.reader(place), "it has ended")
        self.gone(worker_id, place, reader, "it has ended")

    def gone(self, worker_id: int, place: Place | None, reader: object, reason: str) -> None:
        if place is not None and place.heeds(reader) and place.lost is None:
            place.lost = reason
            self.expected.append((worker_id, Notice("lost", reason=reason)))
            awaited = self.last_delivery(place)
            assert awaited is None or awaited.ended

    def fail(self, worker_id: int, place: Place | None) -> None:
        awaited = None if place is None else self.last_delivery(place)
        version = awaited.version if awaited and self.random.random() < 0.7 else 0
        error = self.random.choice([WorkerError, WorkerLostError])(worker_id, "it is gone")
        self.ends.clear()
        self.roster.failed(worker_id, reader := self.reader(place), version, error)
        counts = place is not None and place.heeds(reader)
        assert self.ends == ([(awaited, error)] if counts and version else [])
        if counts and not version and isinstance(error, WorkerLostError):
            self.expected.append((worker_id, Notice("lost", reason="it is gone")))

    def again(self, worker_id: int, place: Place | None) -> None:
        self.roster.expect([worker_id])
        if place is not None:
            place.lost = None

    def withdraw(self, worker_id: int, place: Place | None) -> None:
        if self.sent:
            sent = self.random.choice(self.sent[-2:])
            sent.withdrawn = True
            self.roster.withdraw(sent.publication)

    def remark(self, worker_id: int, place: Place | None) -> None:
        self.roster.remark(worker_id, remark := f"it is slow, {len(self.sent)}")
        awaited = None if place is None else self.last_delivery(place)
        assert awaited is None or awaited.remark == remark

    def add(self, worker_id: int, place: Place | None) -> None:
        added = self.places[worker_id] = Place(worker_id, len(self.sent))
        added.readers += [object()] if self.random.random() < 0.3 else []
        assert self.roster.add(worker_id, *added.readers) is self.owed(added)

    def remove(self, worker_id: int, place: Place | None) -> None:
        assert self.roster.remove(worker_id)
        assert not self.roster.remove(worker_id)
        gone = self.places.pop(worker_id)
        awaited = self.last_delivery(gone)
        assert awaited is None or awaited.ended

    def close(self, worker_id: int, place: Place | None) -> None:
        self.roster.close()
        for known in self.places.values():
            awaited = self.last_delivery(known)
            assert awaited is None or awaited.ended
            assert self.roster.dismissed(known.worker_id, None) == "the sender was closed"
        self.places.clear()
        self.closed = True

    def check(self) -> None:
        """Look at all that the roster answers."""
        assert self.roster.worker_ids == tuple(self.places)
        owed = {i: self.owed(place) for i, place in self.places.items()}
        for worker_id in IDS:
            wanted = owed.get(worker_id)
            assert self.roster.wanted(worker_id) is wanted
            if wanted is not None:
                seen = self.random.randrange(wanted.version)
                assert self.roster.wanted(worker_id, after=seen) is wanted
                assert self.roster.wanted(worker_id, after=wanted.version) is None
        newest = None if self.closed else self.newest_for_all(len(self.sent))
        assert self.roster.all_owed().get(None) is newest
        kept = {each for each in (*owed.values(), newest) if each is not None}
        assert self.roster.owed() == set(self.roster.all_owed().values()) == kept
        besides = [i for i in self.places if self.random.random() < 0.5]
        rest = [owed[i] for i in owed if i not in besides]
        later = {each for each in (*rest, newest if rest else None) if each is not None}
        assert self.roster.owed(besides) == later
        last = {i: self.last_delivery(place) for i, place in self.places.items()}
        awaited = {i for i, delivery in last.items() if delivery and not delivery.ended}
        assert self.roster.awaited() == awaited
        for worker_id, place in self.places.items():
            for reader in place.readers:
                reason = self.roster.dismissed(worker_id, reader)
                assert (reason is None) is (reader is place.readers[-1])
            if not place.readers:
                reason = self.roster.dismissed(worker_id, object())
                assert reason == f"worker {worker_id} was removed from the sender"
        assert self.notices == self.expected


def run(make: Callable[..., Roster], cases: int, first: int = 0) -> None:
    """Try so many orders of at most 12 events; the seed of one that fails is in its error."""
    for seed in range(first, first + cases):
        world = World(make, seed)
        try:
            for _ in range(world.random.randrange(1, 13)):
                world.step()
        except Exception as error:
            raise AssertionError(f"in the order of seed {seed}") from error


def test_every_order_keeps_the_promises() -> None:
    run(Roster, CASES)
