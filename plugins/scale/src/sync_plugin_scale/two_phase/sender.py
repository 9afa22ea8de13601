"""The sender's side: lets workers stage a version, counts their answers, and decides.

There are two transports, of versions and of decisions. All decisions are made in one thread, which
acts on events: answers of workers, and calls of the other threads.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
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
from sync_core.transports import Block, Notice, Publication, Roster
from sync_plugin_scale.resending import AGAIN, PayloadNumbers
from sync_plugin_scale.two_phase.decision import AbortedError, Decision
from sync_plugin_scale.two_phase.scheme import TwoPhase

_log = logging.getLogger("sync_core")
# The share of a send's time in which workers may stage a version, where those that have are to
# commit it within the rest; an estimate.
_STAGING = 0.75
# How long other threads wait for one that acts on what they have put, in seconds.
_PATIENCE = 5.0
# Stands for the workers that are added later among those that are owed a version. A version that
# went to some workers is not owed to later ones, also where only these are left.
_LATER = -1
# The word of a worker that has committed a version; that of one that has dropped it is `AGAIN`.
_COMMITTED = "committed"


@dataclass(eq=False, slots=True)
class _Packed:
    """A version in memory of the sender's own, for workers that come after others have it.

    Args:
        layout: the layout of the version.
        block: the memory.
        words: what workers have said of the version: that they have committed it, or dropped it.
    """

    layout: Layout
    block: Block
    words: dict[int, str] = field(default_factory=dict)

    def payload(self, number: int) -> Payload:
        return Payload(number, self.layout, self.block)


@dataclass(eq=False)
class _Round:
    """One version from the moment it is sent to the decision.

    Args:
        number: the number under which it travels.
        publication: the version; its content is a `_Packed`.
        outgoing: the deliveries to the workers of the send, without those that were removed.
        reached: the workers that get the decision: those of the send, and, where it went to
            all, those that were added since, and `_LATER`.
        required: those without which it is not committed.
        staged: those that have said that they have staged it.
        failures: those that have said that they cannot, or were lost.
        decided: ends with the decision.
        commits: the decision, once there is one.
    """

    number: int
    publication: Publication
    outgoing: dict[int, Delivery]
    reached: set[int]
    required: set[int]
    staged: set[int] = field(default_factory=set)
    failures: dict[int, WorkerError] = field(default_factory=dict)
    decided: Delivery = field(default_factory=lambda: Delivery(-1, 0, 0))
    commits: bool = False

    def may_be_held(self) -> bool:
        """Return whether a worker, or one in its place, may have the version, or get it."""
        return not self.decided.wait(_PATIENCE) or self.commits


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
        # The versions that the transports have for the workers; those that were aborted left out.
        self._sent = Roster(context.worker_ids)
        # The versions that the workers must have: those that the sender decided to commit.
        self._owed = Roster([*context.worker_ids, _LATER])
        self._round: _Round | None = None
        self._numbers, self._decision_numbers = PayloadNumbers(), PayloadNumbers()
        self._blocks: list[Block] = []
        # Workers that may not be waited for: see `wait`.
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
            self._put(self._decide, before, late=True)
            before.decided.wait(_PATIENCE)
        with self._lock:
            packed = self._pack(payload)
            publication = Publication(payload.version, payload.nbytes, packed)
            outgoing = self._sent.publish(publication, worker_ids)
            begun = self._begin(publication, outgoing)
            travelling = replace(packed.payload(begun.number), packing=payload.packing)
            try:
                deliveries = self._versions.send(travelling, worker_ids)
            except BaseException:
                self._put(self._conclude, begun, begun.required, commit=False)
                raise
            for worker_id, delivery in deliveries.items():
                outer = outgoing[worker_id]
                self._note_size(outer, delivery)
                outer.watch(partial(_give_up, delivery))
                outer.on_end = partial(self._put, self._ended, begun, outer)
                delivery.watch(partial(self._put, self._vote, begun))
            if not worker_ids:
                self._put(self._decide, begun)
        return outgoing

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait for the decision about a version, and for the workers to act on it.

        Workers of the send that are not among these deliveries, such as those in quarantine, need
        not have staged the version.
        """
        deadline = time.monotonic() + timeout
        current = self._round
        if current is not None and {d.version for d in deliveries} <= {current.publication.version}:
            worker_ids = {delivery.worker_id for delivery in deliveries}
            self._put(self._require, current, worker_ids)
            if not current.decided.wait(timeout if self._aborts else timeout * _STAGING):
                self._put(self._decide, current, late=True)
                current.decided.wait(_PATIENCE)
        super().wait(deliveries, max(0.0, deadline - time.monotonic()))

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which gets the newest version that all have."""
        with self._lock:
            self._versions.add_worker(worker_id, worker)
            self._decisions.add_worker(worker_id, worker)
            self._owed.add(worker_id)
            sent, current = self._sent.add(worker_id), self._round
            if current is not None and sent is current.publication:
                current.reached.add(worker_id)
            self._connected(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker; the others do not wait for it any more."""
        with self._lock:
            current = self._round
            if current is not None:
                current.outgoing.pop(worker_id, None)
                current.reached.discard(worker_id)
                self._put(self._decide, current)
            # First, so that the roster ends no delivery of theirs with its lock held.
            self._versions.remove_worker(worker_id)
            self._decisions.remove_worker(worker_id)
            self._owed.remove(worker_id)
            self._sent.remove(worker_id)

    def close(self) -> None:
        """End the thread, and close both transports."""
        self._closed = True
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        with self._lock:
            self._versions.close()
            self._decisions.close()
            self._owed.close()
            self._sent.close()
            current, self._round = self._round, None
            self._blocks.clear()
        if current is not None:
            current.decided.acknowledge()

    def _pack(self, payload: Payload) -> _Packed:
        """Copy a version into memory of the sender's own."""
        used = {each.content.block for each in self._owed.owed() | self._sent.owed()}
        # What no worker needs is kept for one more version, and no longer.
        spare = [each for each in self._blocks if each not in used]
        fitting = [each for each in spare if each.nbytes == payload.nbytes]
        block = fitting[0] if fitting else Block.allocate(payload.nbytes)
        self._blocks = [*used, block]
        payload.pack(block)
        return _Packed(payload.layout, block)

    def _begin(self, publication: Publication, outgoing: Mapping[int, Delivery]) -> _Round:
        """Begin a round for a version that was published."""
        # Without workers that another thread has removed.
        known = {i: delivery for i, delivery in outgoing.items() if not delivery.ended}
        later = [_LATER] if self._sent.owed_to_new is publication else []
        number = self._numbers.take(publication.version)
        begun = _Round(number, publication, known, {*known, *later}, {*known})
        for delivery in known.values():
            delivery.may_be_held = begun.may_be_held
        self._round = begun
        return begun

    def _note_size(self, outgoing: Delivery, delivery: Delivery) -> None:
        """Let the report say what of the version travelled."""
        outgoing.nbytes, outgoing.changed = delivery.nbytes, delivery.changed
        outgoing.base = self._numbers.version_of(delivery.base)

    def _put(self, act: Callable[..., None], *args: Any, **options: Any) -> None:
        """Have the thread call a method."""
        self._events.put(partial(act, *args, **options))

    def _run(self) -> None:
        while (act := self._events.get()) is not None:
            try:
                with self._lock:
                    if not self._closed:
                        act()
            except Exception as error:
                _log.exception("a version that was staged is not decided about")
                current = self._round
                if current is not None:
                    current.decided.acknowledge()
                    version = current.publication.version
                    message = f"the decision about version {version} was not sent: {error!r}"
                    _abort(current, message)

    # What follows runs in the thread, with the lock.

    def _require(self, current: _Round, worker_ids: set[int]) -> None:
        """Note for which workers the sender waits."""
        if not current.decided.ended:
            current.required = worker_ids
            self._suspects = frozenset(current.outgoing) - worker_ids
            self._decide(current)

    def _vote(self, current: _Round, delivery: Delivery, error: WorkerError | None) -> None:
        """Act on a worker's answer about a version: it has staged it, or cannot."""
        outgoing = current.outgoing.get(delivery.worker_id)
        if outgoing is None or (error is not None and error is outgoing.error):
            return
        if error is not None:
            self._fail(current, delivery.worker_id, error)
        elif not current.decided.ended:
            # It may have been sent whole after an increment was refused.
            self._note_size(outgoing, delivery)
            current.staged.add(delivery.worker_id)
            self._decide(current)

    def _lost(self, worker_id: int, reason: str) -> None:
        """Act on a worker that is gone, perhaps after it had staged a version."""
        current = self._round
        if current is not None and worker_id in current.staged & current.outgoing.keys():
            self._fail(current, worker_id, WorkerLostError(worker_id, reason))

    def _fail(self, current: _Round, worker_id: int, error: WorkerError) -> None:
        """Note that a worker cannot stage a version, or has it no more."""
        if not current.decided.ended:
            current.staged.discard(worker_id)
            current.failures[worker_id] = error
            current.outgoing[worker_id].fail(error)
            self._decide(current)

    def _ended(self, current: _Round, outgoing: Delivery) -> None:
        """Decide about a version for which nothing waits any more, if the send was given up."""
        waited_for = current.outgoing.keys() - current.failures.keys()
        if outgoing.error is not None and outgoing.worker_id in waited_for:
            self._decide(current, late=True)

    def _decide(self, current: _Round, *, late: bool = False) -> None:
        """Decide about a version, if enough workers have answered, or it is too late for others."""
        required = current.required & current.outgoing.keys()
        failed = required & current.failures.keys()
        missing = required - current.staged - failed
        # Before the sender waits, those that it may not wait for decide nothing.
        enough = failed - self._suspects if self._aborts and failed else not missing
        if late or enough:
            late_ones = missing if late else set()
            commit = not (self._aborts and (failed or late_ones))
            self._conclude(current, late_ones, commit=commit)

    def _conclude(self, current: _Round, late_ones: AbstractSet[int], *, commit: bool) -> None:
        """Tell workers the decision, and send those that lack a version what they must have."""
        if current.decided.ended:
            return
        current.commits = commit
        reached = sorted(current.reached - {_LATER})
        decision = Decision(current.number, current.publication.version, commit)
        try:
            self._tell(decision, reached, current.outgoing)
        finally:
            self._settle(current)
            current.decided.acknowledge()
        self._suspects |= current.failures.keys() | late_ones
        if not commit:
            causes = [f"{error}".partition("\n")[0] for error in current.failures.values()]
            causes += [f"worker {i} did not stage it in time" for i in sorted(late_ones)]
            why = "; ".join(causes) or "the send was given up"
            message = f"no worker commits version {decision.version}: {why}"
            # One that is late is failed by the sender, which knows the deadline.
            _abort(current, message, besides=late_ones)
        self._send_lacking(reached)

    def _settle(self, current: _Round) -> None:
        """Note what the decision means for its workers, and for those that are added later."""
        newest, reached = self._sent.owed_to_new, current.reached
        to_some = _LATER not in reached and reached.issuperset(self._sent.worker_ids)
        if to_some and newest is not None and not self._undecided(newest):
            # Workers were removed meanwhile. The transport of decisions gives this one to a worker
            # that joins, and that of versions gives it another version.
            self._sent.withdraw(newest)
        if current.commits:
            self._owed.publish(current.publication, tuple(reached))
        else:
            self._sent.withdraw(current.publication)

    def _tell(
        self, decision: Decision, worker_ids: Sequence[int], outgoing: Mapping[int, Delivery]
    ) -> None:
        """Send workers a decision; answers to one to commit end these deliveries."""
        version = decision.version if decision.commit else 0
        number = self._decision_numbers.take(version)
        deliveries = self._decisions.send(decision.to_payload(number), worker_ids)
        for worker_id, delivery in deliveries.items():
            outer = outgoing.get(worker_id)
            if outer is not None:
                outer.watch(partial(_give_up, delivery))
            if version:
                delivery.watch(partial(self._put, self._answered, version, outer))

    def _answered(
        self,
        version: int,
        outgoing: Delivery | None,
        delivery: Delivery,
        error: WorkerError | None,
    ) -> None:
        """Act on a worker's answer to the decision to commit a version."""
        if error is not None:
            if outgoing is None or error is not outgoing.error:  # else the send was given up
                self._refused(version, outgoing, delivery, error)
            return
        self._note(delivery.worker_id, version, _COMMITTED)
        if outgoing is None:
            self._notify(delivery.worker_id, Notice("acknowledged", version))
        else:
            answer = delivery.latest
            outgoing.acknowledge(answer and replace(answer, version=version))

    def _refused(
        self, version: int, outgoing: Delivery | None, delivery: Delivery, error: WorkerError
    ) -> None:
        """Act on a worker that has not committed a version that it must commit."""
        answer = delivery.latest
        if answer is None or answer.error is None:
            if outgoing is not None:
                outgoing.fail(error)
            return
        if outgoing is not None:
            outgoing.acknowledge(replace(answer, version=version, request=None))
        if answer.request == AGAIN:
            self._note(delivery.worker_id, version, AGAIN)

    def _note(self, worker_id: int, version: int, word: str) -> None:
        """Note what a worker says of a version, and send it again to one that has dropped it."""
        owed = self._owed.wanted(worker_id)
        if owed is None or owed.version != version:
            return
        words = owed.content.words
        before, words[worker_id] = words.get(worker_id), word
        # Once: a worker that asks for ever must not keep the sender busy.
        if word == AGAIN != before:
            self._send_lacking([worker_id], again=True)

    def _connected(self, worker_id: int) -> None:
        """Act on another receiver in a worker's place, which has no version."""
        owed = self._owed.wanted(worker_id)
        if owed is not None:
            owed.content.words.pop(worker_id, None)
            self._send_lacking([worker_id])

    def _send_lacking(self, worker_ids: Iterable[int], *, again: bool = False) -> None:
        """Send workers what they must have, unless the transports have that for them.

        Args:
            worker_ids: the workers.
            again: whether to send it also where the transports have it.
        """
        lacking: dict[Publication, list[int]] = {}
        for worker_id in worker_ids:
            owed, sent = self._owed.wanted(worker_id), self._sent.wanted(worker_id)
            # A version replaces the one before in a transport. If one that is not decided about is
            # aborted, the worker is sent its own afterwards.
            if owed is None or self._undecided(sent) or (owed is sent and not again):
                continue
            if owed.content.words.get(worker_id) != _COMMITTED:
                lacking.setdefault(owed, []).append(worker_id)
        for owed, some in lacking.items():
            self._send_again(owed, some)

    def _send_again(self, owed: Publication, worker_ids: Sequence[int]) -> None:
        """Send workers a version once more, and that it is committed."""
        number = self._numbers.take(owed.version)
        try:
            self._versions.send(owed.content.payload(number), worker_ids)
            self._tell(Decision(number, owed.version, commit=True), worker_ids, {})
            self._sent.publish(owed, worker_ids)
        except Exception:
            # The version that is on its way to others is decided about all the same.
            _log.exception("workers %s are not sent version %d", worker_ids, owed.version)

    def _undecided(self, publication: Publication | None) -> bool:
        current = self._round
        if current is None or current.decided.ended:
            return False
        return publication is current.publication

    # Called by the transports, in threads of theirs.

    def _heard(self, worker_id: int, notice: Notice) -> None:
        if notice.kind == "acknowledged":
            return  # a late worker has staged a version that was decided about
        # The sender learns it after the answers that came before.
        if notice.kind == "connected":
            self._put(self._connected, worker_id)
        else:
            self._put(self._lost, worker_id, notice.reason)
        self._put(self._notify, worker_id, notice)

    def _heard_of_decision(self, worker_id: int, notice: Notice) -> None:
        version = self._decision_numbers.version_of(notice.version)
        if notice.kind == "acknowledged" and version:
            self._put(self._note, worker_id, version, _COMMITTED)
            self._put(self._notify, worker_id, Notice("acknowledged", version))


def _abort(current: _Round, message: str, besides: AbstractSet[int] = frozenset()) -> None:
    """Fail the deliveries that have not ended, of workers that are not at fault."""
    for worker_id, outgoing in list(current.outgoing.items()):
        if not outgoing.ended and worker_id not in besides:
            outgoing.fail(AbortedError(worker_id, message))


def _give_up(inner: Delivery, outer: Delivery, error: WorkerError | None) -> None:
    """Fail a transport's delivery with that of the sender, which ends every wait for it."""
    if error is not None and error is outer.error and not inner.ended:
        inner.fail(error)
