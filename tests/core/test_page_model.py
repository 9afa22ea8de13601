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

# The content of a record or a slot during a write.
TORN = -1

pytestmark = pytest.mark.usefixtures("no_garbage")

Sender = Literal["idle", "packing", "packed", "waits", "leaves"]
Staging = Literal["polls", "accepted", "asks"]
Committing = Literal["idle", "reads", "has read", "writes", "answers", "leaves"]
Mistake = Literal[
    "takes, then notes",
    "looks, then sets",
    "any answer",
    "sets, then writes",
    "no revocation",
    "any slot",
]
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """An answer on the page, or the message that asks for more: what the worker reads.

    Args:
        version: the version that it is about.
        held: the slots.
    """

    version: int = 0
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class State:
    """The shared memory, and the private state of each side.

    Args:
        offers: whether the event of offers is set; ``answers``, that of answers.
        waiting: the note on the page that a thread waits for answers.
        offer: the version and the slot that are offered.
        answer: the answer on the page.
        socket: what is on its way from the worker: messages that ask for more, and ``look`` (None).
        slots: the version that lies in each slot.
        sender: what the thread that sends does.
        target: the slot that it packs into.
        sent: the newest version, which lies in the slot ``newest``.
        offered: the slot that was offered and not heard of.
        lent: the slots that the worker may read.
        seen: the version that the worker has said something about; ``answered``, its last answer.
        asked: the version after which it has asked for more, and may yet answer about; or 0.
        lending: how many steps of an offer are left, which are made under the lock.
        staging: what the worker does to stage, and ``staged`` what it has staged: version and slot.
        accepted: the version that it has accepted and said nothing about; or 0.
        committing: what it does to commit, and ``holds`` what it reads then.
        reported: the answer that it writes.
    """

    offers: bool = False
    answers: bool = False
    waiting: bool = False
    offer: Place = (0, 0)
    answer: Message = Message()
    socket: tuple[Message | None, ...] = ()
    slots: tuple[int, ...] = (0, 0, 0)
    sender: Sender = "idle"
    target: int = 0
    sent: int = 0
    newest: int = 0
    offered: int | None = None
    lent: frozenset[int] = frozenset()
    seen: int = 0
    answered: int = 0
    asked: int = 0
    lending: int = 0
    staging: Staging = "polls"
    staged: Place | None = None
    accepted: int = 0
    committing: Committing = "idle"
    holds: Place | None = None
    reported: Message = Message()

    @property
    def held(self) -> frozenset[int]:
        """The slots that the worker reads."""
        return frozenset(place[1] for place in (self.staged, self.holds) if place is not None)

    def with_slot(self, slot: int, version: int) -> State:
        """The same, with another version in a slot."""
        return replace(
            self, slots=(*self.slots[:slot], version, *self.slots[slot + 1 :]), target=slot
        )


class Page:
    """The steps of both sides.

    Args:
        versions: how many are sent.
        patient: whether a thread waits until the worker has answered, and has no deadline.
        background: whether a thread of the worker's stages versions while another commits one.
        mistake: what is done wrongly.
    """

    def __init__(
        self, versions: int, *, patient: bool, background: bool, mistake: Mistake | None
    ) -> None:
        self.versions = versions
        self.patient = patient
        self.background = background
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
            if state.socket:
                first, *others = state.socket
                yield self._handle(first, replace(state, socket=tuple(others)))
        yield from self._stage(state)
        yield from self._commit(state)

    def _send(self, state: State) -> Iterator[State]:
        match state.sender:
            case "idle":
                if state.sent < self.versions:
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
                    yield self._take(state)
                if not self.patient or state.answered == state.sent:
                    yield replace(self.leaving[0](state), sender="leaves")
            case "leaves":
                yield replace(self.leaving[1](state), sender="idle")

    def _reserve(self, state: State) -> Iterator[State]:
        """Take a slot without a reader, the newest version's only if no other is free."""
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
        if state.staging == "accepted":
            raise ViolationError("an offer is written while the worker reads it")
        return replace(state, offer=(state.slots[state.newest], state.newest))

    def _set_offers(self, state: State) -> State:
        return replace(state, offers=True)

    def _no_longer_waits(self, state: State) -> State:
        return replace(state, waiting=False)

    def _collect(self, state: State) -> State:
        """Take the answer of a worker that may have given one."""
        return state if state.offered is None and not state.asked else self._take(state)

    def _take(self, state: State) -> State:
        """Take the event of answers; read the answer, and offer what the worker lacks."""
        if not state.answers:
            return state
        state = replace(state, answers=False)
        answer = state.answer
        if answer.version == TORN:
            return state
        done = state.asked <= answer.version or self.mistake == "any answer"
        asked, answered = 0 if done else state.asked, max(state.answered, answer.version)
        return self._heard(answer, replace(state, asked=asked, answered=answered))

    def _handle(self, message: Message | None, state: State) -> State:
        if message is None:
            return self._take(state)
        return self._heard(message, replace(state, asked=message.version))

    def _heard(self, message: Message, state: State) -> State:
        old = {slot for slot in state.lent if 0 <= state.slots[slot] <= message.version}
        offered = None if state.offered in old else state.offered
        seen = max(state.seen, message.version)
        state = replace(state, offered=offered, lent=state.lent - (old - message.held), seen=seen)
        return self._offer(state) if seen < state.sent else state

    def _stage(self, state: State) -> Iterator[State]:
        free = self.background or (state.committing == "idle" and state.staged is None)
        match state.staging:
            case "polls":
                if state.offers and free:
                    yield replace(state, offers=False, staging="accepted")
            case "accepted":
                yield replace(state, staging="asks", staged=state.offer, accepted=state.offer[0])
            case "asks":
                if state.accepted and self.background:
                    asks = Message(state.accepted, state.held)
                    yield replace(state, staging="polls", accepted=0, socket=(*state.socket, asks))
                elif free:
                    yield replace(state, staging="polls")

    def _commit(self, state: State) -> Iterator[State]:
        version, slot = state.holds or (0, 0)
        match state.committing:
            case "idle":
                if state.staged is not None:
                    yield replace(state, committing="reads", holds=state.staged, staged=None)
            case "reads" | "has read":
                if state.slots[slot] != version:
                    raise ViolationError(f"version {version} changes while it is read")
                if state.committing == "reads":
                    yield replace(state, committing="has read")
                else:
                    yield self._begin_answer(version, replace(state, holds=None))
            case "writes":
                yield from self._write_answer(state)
            case "answers":
                yield replace(self.answering[0](state), committing="leaves")
            case "leaves":
                yield replace(self.answering[1](state), committing="idle")

    def _begin_answer(self, version: int, state: State) -> State:
        if version <= state.answer.version:
            raise ViolationError(f"version {version} was read before")
        accepted = 0 if state.accepted == version else state.accepted
        reported = Message(version, state.held)
        return replace(state, committing="writes", accepted=accepted, reported=reported)

    def _write_answer(self, state: State) -> Iterator[State]:
        if state.answer.version != TORN:
            yield replace(state, answer=Message(TORN))
        else:
            yield replace(state, answer=state.reported, committing="answers")

    def _set_answers(self, state: State) -> State:
        return replace(state, answers=True)

    def _look(self, state: State) -> State:
        return state if state.waiting else replace(state, socket=(*state.socket, None))


def explore(
    versions: int,
    *,
    patient: bool = False,
    background: bool = True,
    mistake: Mistake | None = None,
) -> tuple[Graph[State], list[State]]:
    """Search all of it; also the states from which the last version is never known to be there."""
    page = Page(versions, patient=patient, background=background, mistake=mistake)
    graph = search(State(), page.steps)
    return graph, graph.stranded(lambda s: s.sender == "idle" and s.answered == versions)


@pytest.mark.parametrize("patient", [True, False], ids=["patient", "with a deadline"])
@pytest.mark.parametrize(("versions", "background"), [(2, True), (4, False)])
def test_every_order_of_offers_and_answers(versions: int, background: bool, patient: bool) -> None:
    graph, stranded = explore(versions, patient=patient, background=background)
    assert len(graph.states) > 1000
    assert stranded == []


@pytest.mark.parametrize("mistake", ["takes, then notes", "looks, then sets", "any answer"])
def test_an_answer_that_nobody_reads_is_found(mistake: Mistake) -> None:
    _, stranded = explore(2, mistake=mistake)
    assert stranded


@pytest.mark.parametrize("mistake", ["sets, then writes", "no revocation", "any slot"])
def test_what_is_read_while_it_is_written_is_found(mistake: Mistake) -> None:
    with pytest.raises(ViolationError):
        explore(3, mistake=mistake)
