"""Every order of a sender's and a worker's steps on their control page.

See docs/explanation/protocol.md. A step is one access to the page or one system call on an event,
in the order of `SharedMemorySender` and `SharedMemoryReceiver`, which the last test compares; the
two threads of the sender share a lock. `ControlPage` itself writes and reads the
page. Mistakes are planted to show that the search finds them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from tests.kit.state_graph import Graph, ViolationError, search

from sync_core import Answer, Receiver, Sender, SendError
from sync_plugin_std.local import ControlPage, ProcessEvent

# The content of a slot during a write.
TORN = -1
# Within the record of the answer: what is written of it before another process looks.
CUT = 2048 + 8

pytestmark = pytest.mark.usefixtures("no_garbage")

Sending = Literal["idle", "packing", "packed", "waits", "leaves"]
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
        page: the bytes of the page.
        offers: whether the event of offers is set; ``answers``, that of answers.
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

    page: bytes
    offers: bool = False
    answers: bool = False
    socket: tuple[Message | None, ...] = ()
    slots: tuple[int, ...] = (0, 0, 0)
    sender: Sending = "idle"
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
        self.page = ControlPage.create()
        # Each content once, so that states share it.
        self._contents: dict[bytes, bytes] = {}
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

    def start(self) -> State:
        """The state before anything is sent."""
        self.page.write_answer(Answer(version=0), [])
        return State(self._content())

    def _content(self) -> bytes:
        content = bytes(self.page._bytes)
        return self._contents.setdefault(content, content)

    def _restored(self, state: State) -> ControlPage:
        """The page, as it is in a state."""
        self.page._bytes[:] = state.page
        return self.page

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
                yield replace(self._wait(state, waits=True), sender="waits")
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
        self._restored(state).write_offer((state.slots[state.newest], state.newest, "0"))
        return replace(state, page=self._content())

    def _set_offers(self, state: State) -> State:
        return replace(state, offers=True)

    def _wait(self, state: State, *, waits: bool) -> State:
        self._restored(state).waiting = waits
        return replace(state, page=self._content())

    def _no_longer_waits(self, state: State) -> State:
        return self._wait(state, waits=False)

    def _collect(self, state: State) -> State:
        """Take the answer of a worker that may have given one."""
        return state if state.offered is None and not state.asked else self._take(state)

    def _take(self, state: State) -> State:
        """Take the event of answers; read the answer, and offer what the worker lacks."""
        if not state.answers:
            return state
        state = replace(state, answers=False)
        found = self._restored(state).read_answer()
        if found is None:
            return state
        answer = Message(found[0].version, frozenset(found[1]))
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
                version, slot, _ = self._restored(state).read_offer()
                yield replace(state, staging="asks", staged=(version, slot), accepted=version)
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
        found = self._restored(state).read_answer()
        if found is None or version <= found[0].version:
            raise ViolationError(f"version {version} was read before")
        accepted = 0 if state.accepted == version else state.accepted
        reported = Message(version, state.held)
        return replace(state, committing="writes", accepted=accepted, reported=reported)

    def _write_answer(self, state: State) -> Iterator[State]:
        torn = self._restored(state).read_answer() is None
        self.page.write_answer(Answer(version=state.reported.version), sorted(state.reported.held))
        if torn:
            yield replace(state, page=self._content(), committing="answers")
        else:
            self.page._bytes[CUT:] = state.page[CUT:]
            yield replace(state, page=self._content())

    def _set_answers(self, state: State) -> State:
        return replace(state, answers=True)

    def _look(self, state: State) -> State:
        waits = self._restored(state).waiting
        return state if waits else replace(state, socket=(*state.socket, None))


def explore(
    versions: int,
    *,
    patient: bool = False,
    background: bool = True,
    mistake: Mistake | None = None,
) -> tuple[Graph[State], list[State]]:
    """Search all of it; also the states from which the last version is never known to be there."""
    page = Page(versions, patient=patient, background=background, mistake=mistake)
    try:
        graph = search(page.start(), page.steps)
    finally:
        page.page.close()
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


def test_the_code_takes_these_steps_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, list[str]] = {}
    waits = threading.Event()

    def record(step: str) -> None:
        steps.setdefault(threading.current_thread().name, []).append(step)

    def recorded(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any) -> Any:
            if name == "write_answer":
                assert waits.wait(10)
            record(name)
            return method(*args)

        monkeypatch.setattr(owner, name, call)

    flag: Any = ControlPage.__dict__["waiting"]

    def look(page: ControlPage) -> bool:
        record("look")
        return bool(flag.fget(page))

    def note(page: ControlPage, value: bool) -> None:
        record("waits" if value else "no longer waits")
        flag.fset(page, value)
        if value:
            waits.set()

    with (
        ThreadPoolExecutor(1, "worker") as pool,
        Sender("shm", {"w": torch.ones(2)}, num_workers=1) as sender,
        Receiver(sender.address(0), {"w": torch.zeros(2)}) as receiver,
    ):
        for name in ("write_offer", "read_offer", "write_answer", "read_answer"):
            recorded(ControlPage, name)
        for name in ("set", "take"):
            recorded(ProcessEvent, name)
        monkeypatch.setattr(ControlPage, "waiting", property(look, note))
        with pytest.raises(SendError):
            sender.send_async().wait(0)
        # The worker owes an answer.
        assert steps.pop("MainThread")[-2:] == ["no longer waits", "take"]
        waits.clear()
        pending = sender.send_async()
        received = pool.submit(receiver.receive, 10)
        pending.wait()
        assert received.result() == 2
    ours = steps["MainThread"]
    # The offer before is revoked; what comes after the wait are the steps of closing.
    assert ours[:4] == ["take", "write_offer", "set", "waits"]
    assert "read_answer" in ours[4 : ours.index("no longer waits")]
    assert steps["worker_0"] == ["take", "read_offer", "write_answer", "set", "look"]
