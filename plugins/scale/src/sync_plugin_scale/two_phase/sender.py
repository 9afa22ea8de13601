"""The sender's side: lets workers stage a version, counts their answers, and decides.

There are two transports, of versions and of decisions. All decisions are made in one thread, which
acts on events: answers of workers, and calls of the other threads.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sync_core import (
    Delivery,
    Layout,
    Payload,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_core.transports import Block, Notice
from sync_plugin_scale.two_phase.decision import AbortedError, Decision
from sync_plugin_scale.two_phase.receiver import AGAIN
from sync_plugin_scale.two_phase.scheme import TwoPhase

_log = logging.getLogger("sync_core")
# The share of a send's time in which workers may stage a version, where those that have are to
# commit it within the rest; an estimate.
_STAGING = 0.75
# How long other threads wait for one that acts on what they have put, in seconds.
_PATIENCE = 5.0
# The decisions whose numbers are kept, for answers that come late.
_NUMBERS = 1024


@dataclass(frozen=True, eq=False, slots=True)
class _Packed:
    """A version in memory of the sender's own, for workers that come after others have it."""

    version: int
    layout: Layout
    block: Block

    def payload(self, number: int) -> Payload:
        return Payload(number, self.layout, self.block)


@dataclass(eq=False)
class _Member:
    """The versions that a worker was sent last.

    Args:
        packed: the newest version that it was to commit; None for none.
        aborted: whether it was sent a newer one that was not.
        fresh: whether it may lack the version that it must have, as a new receiver does, and one
            that has not answered.
        again: whether it was sent a version again, and has committed none since.
    """

    packed: _Packed | None = None
    aborted: bool = False
    fresh: bool = True
    again: bool = False


class _TwoPhaseDelivery(Delivery):
    """A version on its way to a worker, which ends when the worker has committed it, or cannot."""

    def __init__(self, worker_id: int, packed: _Packed, round_: _Round) -> None:
        super().__init__(worker_id, packed.version, packed.layout.nbytes)
        self.round = round_
        #: The deliveries of both transports.
        self.inner: list[Delivery] = []

    def may_be_held(self) -> bool:
        """Return whether the worker, or one in its place, may have the version, or get it."""
        return not self.round.decided.wait(_PATIENCE) or self.round.commits


@dataclass(eq=False)
class _Round:
    """One version from the moment it is sent to the decision.

    Args:
        number: under which it travels.
        packed: the version.
        to_all: whether it went to all workers.
        suspects: workers that may not be waited for: see `TwoPhaseSender.wait`.
        outgoing: what the workers of the send wait for.
        joined: workers that came after the version was sent to all.
        required: those without which it is not committed.
        waited: whether the sender has said for which it waits.
        staged: those that have said that they have staged it.
        failures: those that have said that they cannot, or were lost.
        decided: ends with the decision.
        commits: the decision, once there is one.
    """

    number: int
    packed: _Packed
    to_all: bool
    suspects: frozenset[int]
    outgoing: dict[int, _TwoPhaseDelivery] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    required: set[int] = field(default_factory=set)
    waited: bool = False
    staged: set[int] = field(default_factory=set)
    failures: dict[int, WorkerError] = field(default_factory=dict)
    decided: Delivery = field(default_factory=lambda: Delivery(-1, 0, 0))
    commits: bool = False

    def reaches(self, worker_id: int) -> bool:
        """Return whether the version is on its way to a worker, and not decided about."""
        return not self.decided.ended and (worker_id in self.outgoing or worker_id in self.joined)


class TwoPhaseSender(SenderTransport):
    """Sends a version, and tells all workers to commit it when all have staged it.

    Args:
        context: what the sender gave to `create_transport`.
        scheme: the scheme.
    """

    def __init__(self, context: TransportContext, scheme: TwoPhase) -> None:
        self._aborts = scheme.failed == "abort"
        self._notify = context.notify
        # Of what follows, and of the transports, which take the calls of one thread at a time.
        # Callbacks of these, which have locks of their own, never take it.
        self._lock = threading.RLock()
        self._members = {worker_id: _Member() for worker_id in context.worker_ids}
        # As that of a worker that joins: what went to all.
        self._joining = _Member()
        self._round: _Round | None = None
        self._number = self._decision_number = 0
        # The version of each number, for the bases of increments inside.
        self._numbered: dict[int, int] = {}
        self._blocks: list[Block] = []
        self._told: dict[int, Decision] = {}
        self._suspects: frozenset[int] = frozenset()
        self._closed = False
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._versions = scheme.versions_sender(context, notify=self._heard)
        try:
            self._decisions = scheme.decisions_sender(context, notify=self._heard_of_decision)
        except BaseException:
            self._versions.close()
            raise
        self._thread = threading.Thread(target=self._run, name="sync-two-phase", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> Any:
        """Return the endpoints of both transports."""
        with self._lock:
            return [self._versions.address(worker_id), self._decisions.address(worker_id)]

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Send a version, which no worker commits before the decision."""
        before = self._round
        if before is not None and not before.decided.ended:
            # It was given up, and workers wait for the decision, not for this version.
            self._events.put(partial(self._conclude, before, late=True))
            before.decided.wait(_PATIENCE)
        with self._lock:
            self._next_number(payload.version)
            packed = self._pack(payload)
            to_all = self._members.keys() <= set(worker_ids)
            begun = _Round(self._number, packed, to_all, self._suspects, required=set(worker_ids))
            begun.outgoing = {i: _TwoPhaseDelivery(i, packed, begun) for i in worker_ids}
            self._round = begun
            travelling = replace(packed.payload(begun.number), packing=payload.packing)
            try:
                deliveries = self._versions.send(travelling, worker_ids)
            except BaseException:
                self._events.put(partial(self._conclude, begun, late=True, refused=True))
                raise
            for worker_id, delivery in deliveries.items():
                outgoing = begun.outgoing[worker_id]
                outgoing.inner.append(delivery)
                self._note_size(outgoing, delivery)
                outgoing.on_end = partial(self._ended, outgoing)
                delivery.watch(partial(self._put, self._vote, begun))
            if not worker_ids:
                self._events.put(partial(self._decide, begun))
            return dict(begun.outgoing)

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait for the decision about a version, and for the workers to act on it.

        Workers of the send that are not among these deliveries, such as those in quarantine, need
        not have staged the version.
        """
        deadline = time.monotonic() + timeout
        given = [delivery for delivery in deliveries if isinstance(delivery, _TwoPhaseDelivery)]
        waiting = given[0].round if given else self._round
        if waiting is not None and not waiting.decided.ended:
            worker_ids = {delivery.worker_id for delivery in given}
            self._events.put(partial(self._require, waiting, worker_ids))
            if not waiting.decided.wait(timeout if self._aborts else timeout * _STAGING):
                self._events.put(partial(self._conclude, waiting, late=True))
                waiting.decided.wait(_PATIENCE)
        super().wait(deliveries, max(0.0, deadline - time.monotonic()))

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which gets the newest version that all have."""
        with self._lock:
            self._versions.add_worker(worker_id, worker)
            self._decisions.add_worker(worker_id, worker)
            self._members[worker_id] = added = replace(self._joining, fresh=True)
            current = self._round
            if current is not None and current.to_all and not current.decided.ended:
                current.joined.add(worker_id)
        if added.aborted:
            self._events.put(partial(self._send_alone, worker_id))

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker; the others do not wait for it any more."""
        with self._lock:
            del self._members[worker_id]
            self._versions.remove_worker(worker_id)
            self._decisions.remove_worker(worker_id)
            current = self._round
        if current is not None and worker_id in current.outgoing:
            error = WorkerError(worker_id, "was removed from the sender")
            current.outgoing[worker_id].fail(error)
            self._events.put(partial(self._decide, current))

    def close(self) -> None:
        """End the thread, and close both transports."""
        self._closed = True
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        with self._lock:
            self._versions.close()
            self._decisions.close()
            current, self._round = self._round, None
            self._members.clear()
            self._blocks.clear()
        if current is not None:
            current.decided.acknowledge()
            for worker_id, outgoing in current.outgoing.items():
                if not outgoing.ended:
                    outgoing.fail(WorkerError(worker_id, "the sender was closed"))

    def _pack(self, payload: Payload) -> _Packed:
        """Copy a version into memory of the sender's own."""
        used = {id(m.packed.block) for m in (*self._members.values(), self._joining) if m.packed}
        if self._round is not None and not self._round.decided.ended:
            # Workers may yet be sent it again.
            used.add(id(self._round.packed.block))
        # What no worker needs is kept for one more version, and no longer.
        spare = [block for block in self._blocks if id(block) not in used]
        self._blocks = [block for block in self._blocks if id(block) in used]
        fitting = [block for block in spare if block.memory.nbytes == payload.nbytes]
        block = fitting[0] if fitting else Block.allocate(payload.nbytes)
        self._blocks.append(block)
        payload.pack(block)
        return _Packed(payload.version, payload.layout, block)

    def _next_number(self, version: int) -> None:
        """Take the number of the next payload, which carries this version."""
        self._number = max(self._number + 1, version)
        self._numbered[self._number] = version
        if len(self._numbered) > _NUMBERS:
            del self._numbered[next(iter(self._numbered))]

    def _note_size(self, outgoing: _TwoPhaseDelivery, delivery: Delivery) -> None:
        """Let the report say what of the version travelled."""
        outgoing.nbytes, outgoing.changed = delivery.nbytes, delivery.changed
        outgoing.base = self._numbered.get(delivery.base, 0)

    def _put(
        self,
        act: Callable[[_Round, Delivery, WorkerError | None], None],
        current: _Round,
        delivery: Delivery,
        error: WorkerError | None,
    ) -> None:
        """Have the thread act on an outcome of a delivery of one of the transports."""
        self._events.put(partial(act, current, delivery, error))

    def _ended(self, outgoing: _TwoPhaseDelivery) -> None:
        """The sender's delivery has ended, perhaps since the send was given up."""
        if outgoing.error is None:
            return
        for delivery in outgoing.inner:
            if not delivery.ended:
                delivery.fail(outgoing.error)
        self._events.put(partial(self._given_up, outgoing))

    def _run(self) -> None:
        while (act := self._events.get()) is not None:
            try:
                with self._lock:
                    if not self._closed:
                        act()
            except Exception as error:
                _log.exception("a version that was staged is not decided about")
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End the send whose decision could not be sent."""
        current = self._round
        if current is None:
            return
        current.decided.acknowledge()
        for worker_id, outgoing in current.outgoing.items():
            if not outgoing.ended:
                message = f"the decision about version {outgoing.version} was not sent: {error!r}"
                outgoing.fail(AbortedError(worker_id, message))

    # What follows runs in the thread, with the lock.

    def _require(self, current: _Round, worker_ids: set[int]) -> None:
        """Note for which workers the sender waits."""
        current.required, current.waited = worker_ids, True
        self._suspects = frozenset(current.outgoing) - worker_ids
        self._decide(current)

    def _vote(self, current: _Round, delivery: Delivery, error: WorkerError | None) -> None:
        """Act on a worker's answer about a version: it has staged it, or cannot."""
        worker_id = delivery.worker_id
        outgoing = current.outgoing[worker_id]
        if current.decided.ended or (error is not None and error is outgoing.error):
            return
        if error is None:
            # It may have been sent whole after an increment was refused.
            self._note_size(outgoing, delivery)
            current.staged.add(worker_id)
        else:
            self._failed(current, worker_id, error)
        self._decide(current)

    def _failed(self, current: _Round, worker_id: int, error: WorkerError) -> None:
        current.staged.discard(worker_id)
        current.failures[worker_id] = error
        current.outgoing[worker_id].fail(error)

    def _given_up(self, outgoing: _TwoPhaseDelivery) -> None:
        """Decide about a version for which nothing waits any more."""
        current = outgoing.round
        known = outgoing.worker_id in current.failures or outgoing.worker_id not in self._members
        if not current.decided.ended and not known:
            self._conclude(current, late=True)

    def _decide(self, current: _Round) -> None:
        """Decide about a version, if enough workers have answered."""
        if current.decided.ended:
            return
        required = current.required & self._members.keys()
        failed = required & current.failures.keys()
        missing = required - current.staged - failed
        if self._aborts and failed:
            # Before the sender waits, those that it may not wait for decide nothing.
            if current.waited or failed - current.suspects:
                self._conclude(current)
        elif not missing:
            self._conclude(current)

    def _conclude(self, current: _Round, *, late: bool = False, refused: bool = False) -> None:
        """Decide about a version now.

        Args:
            current: the version.
            late: whether a worker that has not answered is too late.
            refused: whether the transport raised when it was given the version.
        """
        if current.decided.ended:
            return
        required = current.required & self._members.keys()
        failed = required & current.failures.keys()
        missing = required - current.staged - failed if late else set()
        commit = not refused and not (self._aborts and (failed or missing))
        decision = Decision(current.number, current.packed.version, commit)
        current.commits = commit
        addressed = (current.outgoing.keys() | current.joined) & self._members.keys()
        try:
            self._tell(decision, sorted(addressed), current)
        finally:
            self._remember(current, addressed, commit=commit)
            current.decided.acknowledge()
        if not current.to_all and addressed == self._members.keys():
            # Workers were removed meanwhile. The transport of decisions gives this one to a worker
            # that joins, and that of versions gives it another version.
            self._joining.aborted = True
        self._suspects |= current.failures.keys() | missing
        if not commit:
            self._abort(current, missing)
        lacking: dict[_Packed, list[int]] = {}
        for worker_id in sorted(addressed):
            member = self._members[worker_id]
            if member.aborted and member.fresh and member.packed is not None:
                lacking.setdefault(member.packed, []).append(worker_id)
        for packed, worker_ids in lacking.items():
            self._send_again(packed, worker_ids)

    def _remember(self, current: _Round, addressed: set[int], *, commit: bool) -> None:
        """Note the version that its workers must have."""
        members = [self._members[worker_id] for worker_id in addressed]
        if current.to_all:
            members.append(self._joining)
        for member in members:
            member.aborted = not commit
            if commit:
                member.packed, member.fresh = current.packed, True

    def _abort(self, current: _Round, missing: set[int]) -> None:
        """Fail what workers wait for that are not at fault."""
        causes = [f"{error}".partition("\n")[0] for error in current.failures.values()]
        causes += [f"worker {worker_id} did not stage it in time" for worker_id in sorted(missing)]
        why = "; ".join(causes) or "the send was given up"
        message = f"no worker commits version {current.packed.version}: {why}"
        for worker_id, outgoing in current.outgoing.items():
            # One that is late is failed by the sender, which knows the deadline.
            if not outgoing.ended and worker_id not in missing:
                outgoing.fail(AbortedError(worker_id, message))

    def _tell(self, decision: Decision, worker_ids: Sequence[int], current: _Round | None) -> None:
        """Send workers a decision."""
        self._decision_number += 1
        self._told[self._decision_number] = decision
        if len(self._told) > _NUMBERS:
            del self._told[next(iter(self._told))]
        deliveries = self._decisions.send(decision.to_payload(self._decision_number), worker_ids)
        for worker_id, delivery in deliveries.items():
            outgoing = None if current is None else current.outgoing.get(worker_id)
            if outgoing is not None:
                outgoing.inner.append(delivery)
            delivery.watch(partial(self._answered_late, decision, outgoing))

    def _answered_late(
        self,
        decision: Decision,
        outgoing: _TwoPhaseDelivery | None,
        delivery: Delivery,
        error: WorkerError | None,
    ) -> None:
        self._events.put(partial(self._answered, decision, outgoing, delivery, error))

    def _answered(
        self,
        decision: Decision,
        outgoing: _TwoPhaseDelivery | None,
        delivery: Delivery,
        error: WorkerError | None,
    ) -> None:
        """Act on a worker's answer to a decision."""
        worker_id, answer = delivery.worker_id, delivery.latest
        if not decision.commit or (error and outgoing and error is outgoing.error):
            return
        member = self._members.get(worker_id)
        if error is None and member is not None:
            member.again = False
            if member.packed is not None and member.packed.version <= decision.version:
                member.fresh = False
        if outgoing is None:
            if error is None:
                self._notify(worker_id, Notice("acknowledged", decision.version))
        elif answer is not None and (error is None or answer.error is not None):
            outgoing.acknowledge(replace(answer, version=decision.version, request=None))
        elif error is None:
            outgoing.acknowledge()
        else:
            outgoing.fail(error)
        asks = answer is not None and answer.request == AGAIN and error is not None
        if asks and member is not None and not member.again:
            # Once: a worker that asks for ever must not keep the sender busy.
            member.again = member.fresh = True
            self._send_alone(worker_id)

    def _send_alone(self, worker_id: int) -> None:
        """Send one worker the version that it must have, about which the decision was made."""
        member, current = self._members.get(worker_id), self._round
        if member is None or member.packed is None:
            return
        if current is not None and current.reaches(worker_id):
            # A version replaces the one before in a transport. If this one is aborted, the worker
            # is sent its own afterwards.
            member.fresh = True
            return
        self._send_again(member.packed, [worker_id])

    def _send_again(self, packed: _Packed, worker_ids: Sequence[int]) -> None:
        """Send workers a version once more, and that it is committed."""
        self._next_number(packed.version)
        for worker_id in worker_ids:
            self._members[worker_id].aborted = False
        if self._members.keys() <= set(worker_ids):
            # Now a worker that joins is given this one.
            self._joining.aborted = self._joining.packed is not packed
        try:
            self._versions.send(packed.payload(self._number), worker_ids)
            self._tell(Decision(self._number, packed.version, commit=True), worker_ids, None)
        except Exception:
            # The version that is on its way to others is decided about all the same.
            _log.exception("workers %s are not sent version %d", worker_ids, packed.version)
            for member in (*map(self._members.__getitem__, worker_ids), self._joining):
                member.aborted = True

    def _connected(self, worker_id: int) -> None:
        """Act on another receiver in a worker's place, which has no version."""
        member = self._members.get(worker_id)
        if member is not None:
            member.fresh = True
            if member.aborted:
                self._send_alone(worker_id)

    def _lost(self, worker_id: int, reason: str) -> None:
        """Act on a worker that is gone, perhaps after it had staged a version."""
        current = self._round
        if current is None or current.decided.ended or worker_id not in current.staged:
            return
        self._failed(current, worker_id, WorkerLostError(worker_id, reason))
        self._decide(current)

    # Called by the transports, in threads of theirs.

    def _heard(self, worker_id: int, notice: Notice) -> None:
        if notice.kind == "acknowledged":
            return  # a late worker has staged a version that was decided about
        # The sender learns it after the answers that came before.
        if notice.kind == "connected":
            self._events.put(partial(self._connected, worker_id))
        else:
            self._events.put(partial(self._lost, worker_id, notice.reason))
        self._events.put(partial(self._notify, worker_id, notice))

    def _heard_of_decision(self, worker_id: int, notice: Notice) -> None:
        decision = self._told.get(notice.version)
        if notice.kind == "acknowledged" and decision is not None and decision.commit:
            told = Notice("acknowledged", decision.version)
            self._events.put(partial(self._notify, worker_id, told))
