"""Every order in which two workers can read versions while the sender writes others to its slots.

As in `test_protocol_model.py`, the sender's part is done by its own code: `Publisher`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tests.kit.state_graph import Graph, ViolationError, search

from sync_core import (
    CapacityError,
    Layout,
    Payload,
)
from sync_core.transports import Block, Publication
from sync_plugin_std.local import Publisher, Slot

VERSIONS = 3
IDS = (0, 1)

pytestmark = pytest.mark.usefixtures("no_garbage")


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker's read: the slot, the half that it has seen, and the slot that it keeps."""

    slot: int = 0
    half: int = 0
    kept: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """One state: slots as (index, version, readers), and the two halves of what is in each."""

    slots: tuple[tuple[int, int, frozenset[str]], ...]
    halves: tuple[tuple[int, int, int], ...]
    wanted: tuple[int, int] = (0, 0)
    newest_for_all: int = 0
    version: int = 0
    writing: int = 0
    readings: tuple[Reading, Reading] = (Reading(), Reading())


class Slots:
    """The publisher's own code, put into one state after the other."""

    def __init__(self, limit: int | None, *, versions: int = VERSIONS, early: bool = False) -> None:
        self.publisher = Publisher(Block.allocate, 64, limit, IDS, timeout=0.0)
        self.limit = limit
        self.versions = versions
        self.layout = Layout.of({"w": torch.zeros(1)})
        self.early = early

    def start(self) -> Memory:
        slots = tuple((slot.index, 0, frozenset[str]()) for slot in self.publisher.slots)
        return Memory(slots, tuple((index, 0, 0) for index, _, _ in slots))

    def steps(self, memory: Memory) -> Iterator[Memory]:
        if memory.writing:
            yield self._announce(memory)
        elif memory.version < self.versions:
            yield from self._begin(memory)
        for worker_id in IDS:
            reading = memory.readings[worker_id]
            if reading.slot:
                yield self._finish_reading(memory, worker_id, reading)
            else:
                yield from self._begin_reading(memory, worker_id, reading)
            if reading.slot or reading.kept:
                yield self._die(memory, worker_id)

    def _thaw(self, memory: Memory) -> dict[int, Slot]:
        publisher = self.publisher
        block = publisher.slots[0].block if publisher.slots else Block.allocate(64)
        slots = {
            index: Slot(index, block, version, readers=dict.fromkeys(readers, ""))
            for index, version, readers in memory.slots
        }
        publisher.slots = list(slots.values())
        publisher._made = max(slots)
        published = {
            slot.index: Publication(slot.version, 64)
            for slot in slots.values()
            if slot.index in (*memory.wanted, memory.newest_for_all)
        }
        for index, publication in published.items():
            slots[index].publication = publication
        publisher._reserved = slots.get(memory.writing)
        roster = publisher.roster
        roster._owed_to_new = published.get(memory.newest_for_all)
        for worker_id in IDS:
            worker = roster._workers[worker_id]
            worker.owed, worker.delivery = published.get(memory.wanted[worker_id]), None
            worker.reader, worker.lost = str(worker_id), None
        return slots

    def _freeze(self, memory: Memory) -> Memory:
        publisher = self.publisher
        slots = tuple((s.index, s.version, frozenset(map(str, s.readers))) for s in publisher.slots)
        known = {index: (a, b) for index, a, b in memory.halves}
        indices = {s.publication: s.index for s in publisher.slots if s.publication is not None}
        owed = [publisher.roster._workers[i].owed for i in IDS]
        first, second = (0 if each is None else indices[each] for each in owed)
        newest = publisher.roster._owed_to_new
        return replace(
            memory,
            slots=slots,
            halves=tuple((index, *known.get(index, (0, 0))) for index, _, _ in slots),
            wanted=(first, second),
            newest_for_all=0 if newest is None else indices[newest],
        )

    def _begin(self, memory: Memory) -> Iterator[Memory]:
        """Write the first half of a version, if a slot is free."""
        self._thaw(memory)
        try:
            slot = self.publisher.reserve(64, IDS)
        except CapacityError:
            if self.limit is None:
                raise ViolationError("no version can be sent until a slot is released") from None
            return
        after = self._freeze(memory)
        yield _write(replace(after, writing=slot.index), slot.index, memory.version + 1, None)

    def _announce(self, memory: Memory) -> Memory:
        """Write the second half, and notify all workers."""
        slots = self._thaw(memory)
        version = memory.version + 1
        payload = Payload(version, self.layout, (torch.zeros(1),))
        self.publisher.announce(slots[memory.writing], payload, IDS)
        after = self._freeze(replace(memory, version=version, writing=0))
        return _write(after, memory.writing, None, version)

    def _begin_reading(self, memory: Memory, worker_id: int, reading: Reading) -> Iterator[Memory]:
        self._thaw(memory)
        slot = self.publisher.lend(worker_id, reading.version, str(worker_id), "")
        if slot is None:
            return
        if self.early:
            self.publisher.give_back(str(worker_id))
        half = {index: a for index, a, _ in memory.halves}[slot.index]
        now = replace(reading, slot=slot.index, half=half)
        yield _read(self._freeze(memory), worker_id, now)

    def _finish_reading(self, memory: Memory, worker_id: int, reading: Reading) -> Memory:
        """Read the second half, commit, and keep the slot instead of the one before."""
        halves = {index: (a, b) for index, a, b in memory.halves}
        second = halves.get(reading.slot, (0, 0))[1]
        if second != reading.half:
            raise ViolationError(f"worker {worker_id} reads {reading.half} and {second}")
        if second <= reading.version:
            raise ViolationError(f"worker {worker_id} goes back to {second}")
        self._thaw(memory)
        self.publisher.give_back(str(worker_id), kept=(reading.slot,))
        now = Reading(kept=reading.slot, version=second)
        return _read(self._freeze(memory), worker_id, now)

    def _die(self, memory: Memory, worker_id: int) -> Memory:
        self._thaw(memory)
        self.publisher.lost(worker_id, str(worker_id), "is gone")
        return _read(self._freeze(memory), worker_id, Reading())


def _write(memory: Memory, slot: int, first: int | None, second: int | None) -> Memory:
    halves = tuple(
        (index, a if first is None else first, b if second is None else second)
        if index == slot
        else (index, a, b)
        for index, a, b in memory.halves
    )
    return replace(memory, halves=halves)


def _read(memory: Memory, worker_id: int, reading: Reading) -> Memory:
    first, second = memory.readings
    return replace(memory, readings=(reading, second) if worker_id == 0 else (first, reading))


def check_memory(memory: Memory) -> None:
    """Check that the memory of a zero-copy model is unchanged."""
    halves = {index: (a, b) for index, a, b in memory.halves}
    for worker_id, reading in enumerate(memory.readings):
        if reading.kept and halves.get(reading.kept) != (reading.version, reading.version):
            raise ViolationError(f"the weights of worker {worker_id} change under it")


def explore_slots(
    limit: int | None, *, versions: int = VERSIONS, early: bool = False
) -> Graph[Memory]:
    """Search all of it, and check every state."""
    model = Slots(limit, versions=versions, early=early)

    def steps(memory: Memory) -> Iterator[Memory]:
        for after in model.steps(memory):
            check_memory(after)
            yield after

    return search(model.start(), steps)


@pytest.mark.parametrize("limit", [2, 3])
def test_every_order_of_reading_and_writing(limit: int) -> None:
    graph = explore_slots(limit)
    assert len(graph.states) > 100
    # All versions can be sent from everywhere, as readers may die or come to their end.
    assert graph.stranded(lambda memory: memory.version == VERSIONS) == []


def test_without_a_limit_a_version_can_always_be_sent() -> None:
    # Each of two workers keeps one version, and is stuck in another: the fifth is sent.
    graph = explore_slots(None, versions=5)
    assert max(len(memory.slots) for memory in graph.states) == 2 * len(IDS) + 1
    for memory in graph.states:
        if not any(reading.slot or reading.kept for reading in memory.readings):
            assert len(memory.slots) <= 3


def test_a_slot_given_back_too_early_is_found() -> None:
    with pytest.raises(ViolationError, match=r"reads|change"):
        explore_slots(2, early=True)


def test_a_slot_written_to_while_it_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_slot(self: Publisher, nbytes: int, worker_ids: Sequence[int]) -> Slot:
        del nbytes, worker_ids
        return min(self.slots, key=lambda slot: slot.version)

    monkeypatch.setattr(Publisher, "_free_slot", any_slot)
    with pytest.raises(ViolationError):
        explore_slots(2)
