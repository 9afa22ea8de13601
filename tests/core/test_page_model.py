"""Every order of a sender's and a worker's steps on their control page.

See docs/explanation/protocol.md. A step is one access to the page or one system call on an event,
as `SharedMemorySender` and `SharedMemoryReceiver` make them; the two threads of the sender share a
lock. Mistakes are planted to show that the search finds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from tests.core.state_graph import Graph, ViolationError, search

VERSIONS = 3
# What a record or a slot holds while it is being written.
TORN = -1

pytestmark = pytest.mark.usefixtures("no_garbage")

Sender = Literal["idle", "packing", "packed", "waits", "leaves"]
Worker = Literal["polls", "accepted", "reads", "has read", "writes", "answers", "leaves"]
Mistake = Literal[
    "takes, then notes", "looks, then sets", "sets, then writes", "no revocation", "any slot"
]


@dataclass(frozen=True, slots=True)
class State:
    """What both sides share, and what each of them knows.

    Args:
        offers: whether the event of offers is set; ``answers``, that of answers.
        waiting: the note on the page that a thread waits for answers.
        offer: the version and the slot that are offered.
        answer: the version that is answered about.
        look: whether the message ``look`` is on its way.
        slots: the version that lies in each slot.
        sender: what the thread that sends does.
        target: the slot that it packs into.
        sent: the newest version, which lies in the slot ``newest``.
        offered: the slot that was offered and not answered about.
        lent: the slots that the worker may read.
        seen: the version that the worker has answered about.
        lending: how many steps of an offer are left, which are made under the lock.
        worker: what the worker does, with the version and the slot that it ``holds``.
    """

    offers: bool = False
    answers: bool = False
    waiting: bool = False
    offer: tuple[int, int] = (0, 0)
    answer: int = 0
    look: bool = False
    slots: tuple[int, ...] = (0, 0, 0)
    sender: Sender = "idle"
    target: int = 0
    sent: int = 0
    newest: int = 0
    offered: int | None = None
    lent: frozenset[int] = frozenset()
    seen: int = 0
    lending: int = 0
    worker: Worker = "polls"
    holds: tuple[int, int] = (0, 0)

    def with_slot(self, slot: int, version: int) -> State:
        """The same, with another version in a slot."""
        return replace(
            self, slots=(*self.slots[:slot], version, *self.slots[slot + 1 :]), target=slot
        )


class Page:
    """The steps of both sides.

    Args:
        patient: whether a thread waits until the worker has answered, and has no deadline.
        mistake: what is done wrongly.
    """

    def __init__(self, *, patient: bool, mistake: Mistake | None = None) -> None:
        self.patient = patient
        self.mistake = mistake
        # The last steps of the thread that waits, and of a worker that answers; and of an offer.
        self.leaving = [self._no_longer_waits, self._collect]
        self.answering = [self._set_answers, self._look]
        self.lending = [self._write_offer, self._set_offers]
        for steps, reverse in (
            (self.leaving, "takes, then notes"),
            (self.answering, "looks, then sets"),
            (self.lending, "sets, then writes"),
        ):
            if mistake == reverse:
                steps.reverse()

    def steps(self, state: State) -> Iterator[State]:
        """The states that one step leads to."""
        if state.lending:
            left = state.lending - 1
            yield replace(self.lending[-state.lending](state), lending=left)
        else:
            yield from self._send(state)
            if state.look:
                yield self._collect(replace(state, look=False))
        yield from self._read(state)
        yield from self._answer(state)

    def _send(self, state: State) -> Iterator[State]:
        match state.sender:
            case "idle":
                if state.sent < VERSIONS:
                    yield from self._reserve(state)
            case "packing":
                sent, newest = state.sent + 1, state.target
                packed = replace(state.with_slot(newest, sent), sent=sent, newest=newest)
                yield self._offer(replace(packed, sender="packed"))
            case "packed":
                yield replace(state, sender="idle")
                yield replace(state, sender="waits", waiting=True)
            case "waits":
                if state.answers:
                    yield self._collect(state)
                if not self.patient or state.seen == state.sent:
                    yield replace(self.leaving[0](state), sender="leaves")
            case "leaves":
                yield replace(self.leaving[1](state), sender="idle")

    def _reserve(self, state: State) -> Iterator[State]:
        """Take a slot that nobody reads, and not the newest version's if there is another."""
        free = [slot for slot in range(len(state.slots)) if slot not in state.lent]
        if self.mistake == "any slot":
            free = list(range(len(state.slots)))
        if not free:
            state = self._revoke(state)
            free = [slot for slot in range(len(state.slots)) if slot not in state.lent]
        for slot in [slot for slot in free if slot != state.newest] or free:
            yield replace(state.with_slot(slot, TORN), sender="packing")

    def _revoke(self, state: State) -> State:
        if state.offered is None or not state.offers:
            return state
        return replace(state, offers=False, lent=state.lent - {state.offered}, offered=None)

    def _offer(self, state: State) -> State:
        if self.mistake != "no revocation":
            state = self._revoke(state)
            if state.offered is not None:
                return state
        lent = state.lent | {state.newest}
        return replace(state, offered=state.newest, lent=lent, lending=2)

    def _write_offer(self, state: State) -> State:
        if state.worker == "accepted":
            raise ViolationError("an offer is written while the worker reads it")
        return replace(state, offer=(state.slots[state.newest], state.newest))

    def _set_offers(self, state: State) -> State:
        return replace(state, offers=True)

    def _no_longer_waits(self, state: State) -> State:
        return replace(state, waiting=False)

    def _collect(self, state: State) -> State:
        """Take the event of answers; read the answer, and offer what the worker lacks."""
        if not state.answers:
            return state
        state = replace(state, answers=False)
        if state.answer == TORN:
            return state
        read = {slot for slot in state.lent if 0 <= state.slots[slot] <= state.answer}
        offered = None if state.offered in read else state.offered
        seen = max(state.seen, state.answer)
        state = replace(state, offered=offered, lent=state.lent - read, seen=seen)
        return self._offer(state) if seen < state.sent else state

    def _read(self, state: State) -> Iterator[State]:
        version, slot = state.holds
        match state.worker:
            case "polls":
                if state.offers:
                    yield replace(state, offers=False, worker="accepted")
            case "accepted":
                yield replace(state, worker="reads", holds=state.offer)
            case "reads" | "has read":
                if state.slots[slot] != version:
                    raise ViolationError(f"version {version} changes while it is read")
                if version <= state.answer:
                    raise ViolationError(f"version {version} was read before")
                yield replace(state, worker="has read" if state.worker == "reads" else "writes")

    def _answer(self, state: State) -> Iterator[State]:
        match state.worker:
            case "writes":
                if state.answer != TORN:
                    yield replace(state, answer=TORN)
                else:
                    yield replace(state, answer=state.holds[0], worker="answers")
            case "answers":
                yield replace(self.answering[0](state), worker="leaves")
            case "leaves":
                yield replace(self.answering[1](state), worker="polls")

    def _set_answers(self, state: State) -> State:
        return replace(state, answers=True)

    def _look(self, state: State) -> State:
        return replace(state, look=state.look or not state.waiting)


def explore(*, patient: bool, mistake: Mistake | None = None) -> Graph[State]:
    """Search all of it."""
    return search(State(), Page(patient=patient, mistake=mistake).steps)


def is_up_to_date(state: State) -> bool:
    """Return whether the sender knows that the worker has the last version."""
    return state.sender == "idle" and state.seen == VERSIONS


@pytest.mark.parametrize("patient", [True, False])
def test_every_order_of_offers_and_answers(patient: bool) -> None:
    graph = explore(patient=patient)
    assert len(graph.states) > 1000
    assert graph.stranded(is_up_to_date) == []


@pytest.mark.parametrize("mistake", ["takes, then notes", "looks, then sets"])
def test_an_answer_that_nobody_reads_is_found(mistake: Mistake) -> None:
    assert explore(patient=False, mistake=mistake).stranded(is_up_to_date)


@pytest.mark.parametrize("mistake", ["sets, then writes", "no revocation", "any slot"])
def test_what_is_read_while_it_is_written_is_found(mistake: Mistake) -> None:
    with pytest.raises(ViolationError):
        explore(patient=False, mistake=mistake)
