"""Every order in which things can happen to a sender and two workers: docs/explanation/protocol.md.

The model is searched, breadth first, from one state to all that can be reached. The steps
of the sender are taken by its own code, which is given a state and looked at afterwards:
`Membership`, `Delivery` and `PendingSend`. Those of workers and the network are written here.
Mistakes are planted to show that the search finds them. `test_slot_model.py` does the same for
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pytest
from tests.kit.state_graph import Graph, ViolationError, search

from sync_core import (
    Address,
    Delivery,
    PendingSend,
    SendError,
    SendReport,
    WorkerLostError,
    WorkerState,
    WorkerStatus,
)
from sync_core.sending import membership
from sync_core.sending.failure_policy import FailureHandler
from sync_core.sending.membership import Membership
from sync_core.sending.worker_state import acknowledged
from sync_core.transports import Notice

IDS = (0, 1)

pytestmark = pytest.mark.usefixtures("no_garbage")

Outcome = Literal["open", "acknowledged", "lost", "late"]


@dataclass(frozen=True, slots=True)
class Process:
    """A receiver, the first of its worker or one that came later; and what is left of those before.

    ``gone`` is what the transport knows: that one was connected, and that no other is.
    """

    seat: int
    life: int = 1
    alive: bool = True
    connected: bool = False
    gone: bool = False
    version: int = 0
    staged: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """An acknowledgement on its way."""

    worker_id: int
    seat: int
    life: int
    version: int
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Parcel:
    """The delivery to one worker of the send under way."""

    worker_id: int
    seat: int
    waited: bool
    outcome: Outcome = "open"


@dataclass(frozen=True, slots=True)
class World:
    """One state. Of what may happen any number of times, so much is left."""

    members: tuple[tuple[int, WorkerStatus], ...]
    processes: tuple[Process, ...]
    version: int = 0
    newest_for_all: int = 0
    pending: tuple[Parcel, ...] | None = None
    messages: frozenset[Message] = frozenset()
    # Deaths, copies of messages and removals, all of worker 0; the other answers in one step, and
    # is there to be kept from its versions.
    faults_left: int = 2


@dataclass(frozen=True)
class Mistakes:
    """The defects that may be planted."""

    receiver_takes_anything: bool = False
    replaced_may_answer: bool = False
    losses_are_silent: bool = False
    waits_for_everybody: bool = False


class Search:
    """The sender's own code, put into one state after the other."""

    def __init__(self, remedy: str, versions: int, mistakes: Mistakes) -> None:
        self.remedy = remedy
        self.versions = versions
        self.mistakes = mistakes
        self.members = Membership((), timeout=1.0, clock=lambda: 0.0)
        self.remedies = FailureHandler("quarantine")

    def start(self) -> World:
        members = Membership(IDS, timeout=1.0, clock=lambda: 0.0)
        processes = tuple(Process(seat=status.seat) for status in members.statuses.values())
        world = World(tuple(members.statuses.items()), processes)
        return self._connect(world, worker_id=1)

    def steps(self, world: World) -> Iterator[World]:
        if world.version < self.versions and world.pending is None and world.members:
            yield self._send(world)
        if world.pending is not None:
            yield self._end(world)
        for worker_id in IDS:
            yield from self._steps_of(world, worker_id)
        for message in world.messages:
            yield self._deliver(world, message)
            if world.faults_left and not message.copied:
                copies = world.messages | {replace(message, copied=True)}
                yield replace(world, messages=copies, faults_left=world.faults_left - 1)

    def _steps_of(self, world: World, worker_id: int) -> Iterator[World]:
        status = dict(world.members).get(worker_id)
        process = world.processes[worker_id]
        if status is None:
            yield self._add(world, worker_id)
            return
        if world.faults_left and worker_id == 0:
            yield self._remove(world, worker_id)
        if status.retry_at:
            yield self._apply(world, lambda m: m._workers.update({worker_id: _due(status)}))
        if process.alive:
            yield from self._steps_of_process(world, worker_id, process, status)
        else:
            if process.connected:
                yield self._lose(world, worker_id)
            yield self._replace(world, worker_id, status)

    def _steps_of_process(
        self, world: World, worker_id: int, process: Process, status: WorkerStatus
    ) -> Iterator[World]:
        if world.faults_left and worker_id == 0:
            dead = _put(world, worker_id, replace(process, alive=False))
            dead = replace(dead, faults_left=world.faults_left - 1)
            yield dead
            # Its messages may be lost with it.
            yield replace(dead, messages=frozenset())
        if not process.connected:
            yield self._connect(world, worker_id)
        elif process.staged:
            yield self._commit(world, worker_id)
        else:
            # The newest version when it looked; by mistake, also the one before.
            takes = {status.wanted} if status.wanted > process.version else set()
            if self.mistakes.receiver_takes_anything:
                takes = set(range(1, status.wanted + 1))
            for version in sorted(takes):
                staged = _put(world, worker_id, replace(process, staged=version))
                yield staged if worker_id == 0 else self._commit_and_answer(staged, worker_id)

    def _apply(self, world: World, act: Callable[[Membership], object]) -> World:
        """Let the members be those of a world, do something, and look at them again."""
        self._thaw(world)
        act(self.members)
        return self._freeze(world)

    def _thaw(self, world: World) -> None:
        self.members._workers = dict(world.members)
        self.members._newest_for_all = world.newest_for_all
        self.members._seats = max([p.seat for p in world.processes], default=0)

    def _freeze(self, world: World) -> World:
        members = tuple((i, _plain(status)) for i, status in sorted(self.members._workers.items()))
        return replace(world, members=members, newest_for_all=self.members._newest_for_all)

    def _send(self, world: World) -> World:
        self._thaw(world)
        version = world.version + 1
        deliveries = {i: Delivery(i, version, nbytes=8) for i, _ in world.members}
        unwaited = self.members.sent(version, deliveries)
        if self.mistakes.waits_for_everybody:
            unwaited = {}
        for worker_id, delivery in deliveries.items():
            if world.processes[worker_id].gone and not self.mistakes.losses_are_silent:
                delivery.fail(WorkerLostError(worker_id, "is gone"))
        parcels = tuple(
            Parcel(i, status.seat, i not in unwaited, _outcome(deliveries[i]))
            for i, status in world.members
        )
        return self._freeze(replace(world, version=version, pending=parcels))

    def _pending(self, world: World) -> tuple[PendingSend, dict[int, Delivery]]:
        """The send under way, by the sender's own class, and its deliveries."""
        assert world.pending is not None
        deliveries = {}
        for parcel in world.pending:
            delivery = deliveries[parcel.worker_id] = Delivery(parcel.worker_id, world.version, 8)
            if parcel.outcome == "lost":
                delivery.fail(WorkerLostError(parcel.worker_id, "is gone"))
            elif parcel.outcome == "acknowledged":
                delivery.acknowledge()
            answered = partial(self.members._answered, parcel.worker_id, parcel.seat)
            delivery._watchers = (answered,)
        pending = PendingSend(
            world.version,
            deliveries,
            [],
            started=0.0,
            timeout=0.0,
            finish=self._finish,
            unwaited={p.worker_id: "quarantine" for p in world.pending if not p.waited},
        )
        return pending, deliveries

    def _finish(self, report: SendReport, *, waited: bool) -> SendReport:
        if self.remedy != "quarantine":
            return report
        return self.remedies.apply(report, self.members, self.members.remove, _no_address)

    def _end(self, world: World) -> World:
        self._thaw(world)
        pending, _ = self._pending(world)
        try:
            report = pending.wait(0.0)
        except SendError as error:
            report = error.report
        for parcel in world.pending or ():
            if (parcel.worker_id in report.updated) is not (parcel.outcome == "acknowledged"):
                raise ViolationError(f"the report is wrong about worker {parcel.worker_id}")
        return self._freeze(replace(world, pending=None))

    def _settle(self, world: World, worker_id: int, act: Callable[[Delivery], object]) -> World:
        """Something becomes of the delivery under way."""
        self._thaw(world)
        _, deliveries = self._pending(world)
        act(deliveries[worker_id])
        parcels = tuple(
            replace(p, outcome=_outcome(deliveries[p.worker_id])) for p in world.pending or ()
        )
        return self._freeze(replace(world, pending=parcels))

    def _deliver(self, world: World, message: Message) -> World:
        worker_id = message.worker_id
        world = replace(world, messages=world.messages - {message})
        process = world.processes[worker_id]
        replaced = (process.seat, process.life) != (message.seat, message.life)
        if replaced and process.connected and not self.mistakes.replaced_may_answer:
            return world  # as `Publisher.answer` has it
        parcels = {p.worker_id: p for p in world.pending or ()}
        parcel = parcels.get(worker_id)
        if parcel is not None and message.version == world.version and parcel.seat == message.seat:
            return self._settle(world, worker_id, Delivery.acknowledge)
        # A delivery that has ended, or that never existed.
        late = Delivery(worker_id, message.version, nbytes=8)
        late._watchers = (partial(self.members._answered, worker_id, message.seat),)
        return self._apply(world, lambda _: late.acknowledge())

    def _connect(self, world: World, worker_id: int) -> World:
        process = replace(world.processes[worker_id], connected=True, gone=False)
        world = _put(world, worker_id, process)
        return self._apply(world, lambda m: m.notify(worker_id, Notice("connected")))

    def _lose(self, world: World, worker_id: int) -> World:
        """The transport finds that a process is gone."""
        process = world.processes[worker_id]
        world = _put(world, worker_id, replace(process, connected=False, gone=True))
        notice = Notice("lost", reason="it is gone")
        world = self._apply(world, lambda m: m.notify(worker_id, notice))
        if self.mistakes.losses_are_silent:
            return world
        if any(p.worker_id == worker_id and p.seat == process.seat for p in world.pending or ()):
            error = WorkerLostError(worker_id, "is gone")
            return self._settle(world, worker_id, lambda delivery: delivery.fail(error))
        return world

    def _replace(self, world: World, worker_id: int, status: WorkerStatus) -> World:
        """Another process takes the place of a dead one, by the sender's doing or not."""
        process = world.processes[worker_id]
        another = Process(seat=status.seat, life=process.life + 1, gone=process.gone)
        world = _put(world, worker_id, another)
        if self.remedy != "restart":
            return world

        def restart(members: Membership) -> None:
            members.restart(worker_id, status.seat)
            members.restarted(worker_id, status.seat)

        return self._apply(world, restart)

    def _commit(self, world: World, worker_id: int) -> World:
        process = world.processes[worker_id]
        if process.staged < process.version:
            raise ViolationError(f"worker {worker_id} goes back from {process.version}")
        version = process.staged
        message = Message(worker_id, process.seat, process.life, version)
        world = _put(world, worker_id, replace(process, version=version, staged=0))
        return replace(world, messages=world.messages | {message})

    def _commit_and_answer(self, world: World, worker_id: int) -> World:
        after = self._commit(world, worker_id)
        (message,) = after.messages - world.messages
        return self._deliver(after, message)

    def _remove(self, world: World, worker_id: int) -> World:
        world = replace(world, faults_left=world.faults_left - 1)
        if any(p.worker_id == worker_id for p in world.pending or ()):
            error = WorkerLostError(worker_id, "was removed")
            world = self._settle(world, worker_id, lambda delivery: delivery.fail(error))
        return self._apply(world, lambda members: members.remove(worker_id))

    def _add(self, world: World, worker_id: int) -> World:
        world = self._apply(world, lambda members: members.add(worker_id))
        seat = dict(world.members)[worker_id].seat
        return _put(world, worker_id, Process(seat=seat, life=1))


def _put(world: World, worker_id: int, process: Process) -> World:
    processes = tuple(
        process if i == worker_id else known for i, known in enumerate(world.processes)
    )
    return replace(world, processes=processes)


def _no_address(worker_id: int) -> Address:
    raise AssertionError(f"worker {worker_id} is not to be restarted here")


def _plain(status: WorkerStatus) -> WorkerStatus:
    """Without what makes states differ and nothing else."""
    return replace(status, since=0.0, error=None, failures=min(status.failures, 1), returned=False)


def _due(status: WorkerStatus) -> WorkerStatus:
    return replace(status, retry_at=0.0)


def _outcome(delivery: Delivery) -> Outcome:
    if not delivery.wait(0):
        return "open"
    if delivery.error is None:
        return "acknowledged"
    return "lost" if isinstance(delivery.error, WorkerLostError) else "late"


def check_world(world: World) -> None:
    """Return what is true of every state."""
    for worker_id, status in world.members:
        process = world.processes[worker_id]
        if status.version > status.wanted or status.wanted > world.version:
            raise ViolationError(f"worker {worker_id} has what it was never sent")
        # Of one that was replaced and has not connected, the sender cannot know.
        known = process.seat == status.seat and (process.connected or process.life == 1)
        if known and status.state is WorkerState.CURRENT and process.version < status.wanted:
            raise ViolationError(f"worker {worker_id} is not current")
    for parcel in world.pending or ():
        process = world.processes[parcel.worker_id]
        first = (process.seat, process.life) == (parcel.seat, 1)
        if parcel.outcome == "acknowledged" and first and process.version < world.version:
            raise ViolationError(f"worker {parcel.worker_id} did not commit {world.version}")
        if not parcel.waited or parcel.outcome != "open":
            continue
        found = dict(world.members).get(parcel.worker_id)
        if found is not None and found.seat == parcel.seat and found.state is WorkerState.LOST:
            raise ViolationError(f"the send waits for worker {parcel.worker_id}, which is gone")
        if found is not None and found.retry_at and found.state is WorkerState.QUARANTINED:
            raise ViolationError(f"the send waits for worker {parcel.worker_id}, in quarantine")


def explore(
    remedy: str, versions: int, faults: int, mistakes: Mistakes = Mistakes()
) -> Graph[World]:
    """Search all of it, and check every state."""
    model = Search(remedy, versions, mistakes)

    def steps(world: World) -> Iterator[World]:
        for after in model.steps(world):
            check_world(after)
            yield after

    return search(replace(model.start(), faults_left=faults), steps)


def is_settled(world: World) -> bool:
    """Return whether no worker waits, and all have the newest version."""
    return world.pending is None and all(
        status.state is WorkerState.CURRENT for _, status in world.members
    )


@pytest.mark.parametrize(
    ("remedy", "versions", "faults"),
    [("raise", 3, 1), ("restart", 3, 1), ("quarantine", 3, 0), ("quarantine", 2, 1)],
)
def test_every_order_of_events(remedy: str, versions: int, faults: int) -> None:
    graph = explore(remedy, versions, faults)
    assert len(graph.states) > 500
    # From every state a send ends, and all workers can be brought up to date.
    assert graph.stranded(is_settled) == []


def any_counts(worker: WorkerStatus, version: int) -> WorkerStatus:
    """Take every acknowledgement for one of the newest version."""
    return replace(worker, state=WorkerState.CURRENT, version=worker.wanted)


def keeps_its_version(worker: WorkerStatus, now: float) -> WorkerStatus:
    """Believe that a new receiver has what the one before it had."""
    del now
    return worker


def never_back(worker: WorkerStatus, version: int) -> WorkerStatus:
    """Keep a worker in quarantine for good."""
    if worker.state is WorkerState.QUARANTINED:
        return worker
    return acknowledged(worker, version)


@pytest.mark.parametrize(
    ("mistake", "finds"),
    [
        (Mistakes(receiver_takes_anything=True), "goes back"),
        (Mistakes(replaced_may_answer=True), "is not current"),
        (Mistakes(losses_are_silent=True), "which is gone"),
        (Mistakes(waits_for_everybody=True), "in quarantine"),
        (("acknowledged", any_counts), "is not current|never sent"),
        (("connected", keeps_its_version), "is not current|is gone"),
        (("seats", None), "is not current"),
    ],
    ids=[
        "takes anything",
        "replaced may answer",
        "silent losses",
        "waits for all",
        "any answer counts",
        "keeps its version",
        "no seats",
    ],
)
def test_mistakes_are_found(
    mistake: Mistakes | tuple[str, Any], finds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistakes = mistake if isinstance(mistake, Mistakes) else Mistakes()
    if mistake == ("seats", None):
        answered = Membership._answered

        def any_seat(self: Membership, worker_id: int, seat: int, *rest: Any) -> None:
            del seat
            if worker_id in self:
                answered(self, worker_id, self._workers[worker_id].seat, *rest)

        monkeypatch.setattr(Membership, "_answered", any_seat)
    elif isinstance(mistake, tuple):
        monkeypatch.setattr(membership, *mistake)
    with pytest.raises(ViolationError, match=finds):
        explore("quarantine", 2, 1, mistakes)


def test_a_way_that_leads_nowhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "acknowledged", never_back)
    assert explore("quarantine", 2, 0).stranded(is_settled)
