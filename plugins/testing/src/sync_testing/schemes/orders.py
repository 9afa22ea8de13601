"""A case: random orders of sends, late answers, failures, departures and returns.

A state machine of Hypothesis generates the orders and records the history. The history checker,
which knows the promises, then checks it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, HypothesisException
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sync_core import PendingSend, SendError, SyncError, WorkerState
from sync_testing.expectations import NO_NEWS, RECEIVED
from sync_testing.interrupts import interrupted
from sync_testing.recording import Recorder, WorkerRecorder
from sync_testing.schemes.models import fill, make_policy
from sync_testing.schemes.pool import SchemeCases, SharedGroup, ended
from sync_testing.schemes.worker import Worker
from sync_testing.worker_groups import eventually

#: The number of orders to try. If set, orders also kill workers, and failing orders are shrunk.
ORDERS = "SYNC_CONFORMANCE_ORDERS"
_FEW, _STEPS = 6, 30
_WORKERS = (0, 1)
LATE = "an answer must count when it comes, also after its send was given up"
ANEW = "a worker that restarts must not count as one that has a version"
_some = st.sets(st.sampled_from(_WORKERS), min_size=1)
_one = st.sampled_from(_WORKERS)


class OrderCases(SchemeCases):
    """Random orders of calls."""

    @pytest.mark.timeout(3600 if ORDERS in os.environ else 300)
    @pytest.mark.usefixtures("asking")
    def test_random_orders_of_calls(self, pool: SharedGroup) -> None:
        asked = os.environ.get(ORDERS)
        phases = [Phase.generate, *([Phase.shrink] if asked else [])]
        failures: list[Exception] = []
        fleet = {"cases": self, "pool": pool, "thorough": bool(asked), "failures": failures}
        try:
            run_state_machine_as_test(
                type("Fleet", (Fleet,), fleet),
                settings=settings(
                    max_examples=int(asked or _FEW),
                    stateful_step_count=_STEPS,
                    deadline=None,
                    derandomize=not asked,
                    database=None,
                    phases=phases,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except Flaky:
            # The same order did not fail again, and Hypothesis reports that instead of the failure.
            if not failures:
                raise
            failures[0].add_note("the same order does not fail each time: the timing matters")
            raise failures[0] from None


class Fleet(RuleBasedStateMachine):
    """A sender and two workers, each of which may be active, silent, broken or gone.

    In version ``n`` of the model every parameter is ``n``, so a worker's values show which version
    it has, and whether it is complete.
    """

    cases: ClassVar[SchemeCases]
    pool: ClassVar[SharedGroup]
    #: Whether to kill workers.
    thorough: ClassVar[bool]
    #: Collects the errors of failing orders.
    failures: ClassVar[list[Exception]] = []

    def __init__(self) -> None:
        super().__init__()
        self.ends = ExitStack()
        self.recorder = Recorder()
        self.members = set(_WORKERS)
        #: The workers with a receiver, and those whose model fits no version.
        self.lives: dict[int, WorkerRecorder] = {}
        self.broken: set[int] = set()
        self.staged: set[int] = set()
        #: The workers that refused the newest version, and those whose send was interrupted.
        self.refused: set[int] = set()
        self.unsure: set[int] = set()
        self.pending: PendingSend | None = None
        self.killed = False
        self.value = 0
        self.looked = ""

    def begun(self) -> bool:
        return self.pending is not None

    def idle(self) -> bool:
        return self.pending is None

    def lonely(self) -> bool:
        """Return whether a worker commits independently of the others."""
        return not self.cases.can("all_or_none")

    def replaces(self) -> bool:
        """Return whether a worker may be killed: once per order, since a restart takes seconds."""
        kinds = self.pool.group_class.capabilities
        return self.thorough and not self.killed and {"cross_process", "restart"} <= kinds

    @initialize()
    def begin(self) -> None:
        self.pool.make_ready()
        self.policy = make_policy()
        self.sender = self.ends.enter_context(
            self.cases.sender(self.policy, len(_WORKERS), timeout=self.cases.slack)
        )
        for worker_id in _WORKERS:
            self.join(worker_id)

    @rule(to=_some)
    @precondition(idle)
    def send(self, to: set[int]) -> None:
        """Send to workers that are all receiving."""
        if to := {i for i in to if self.attends(i)}:
            self.send_to(to)

    @rule(to=_some)
    @precondition(idle)
    def begin_send(self, to: set[int]) -> None:
        """Start a send, and leave it pending."""
        if to := to & self.members:
            self.start_send(to, None)

    @rule()
    @precondition(begun)
    def give_up(self) -> None:
        """Give up the pending send."""
        self.end_send(0.0)

    @rule(moment=st.integers(0, 150))
    @precondition(lambda self: self.idle() and self.members)
    def interrupt(self, moment: int) -> None:
        """Press Ctrl-C at some moment of a send without answers."""
        value = self.next_version()
        self.unsure.update(_WORKERS)
        with interrupted(moment), suppress(SyncError):
            self.sender.send(version=value, timeout=0.0)
        # Its progress is unknown; if nothing was sent, the next send has this version.
        self.recorder.send(value, digest=f"{float(value)}")
        self.recorder.add("raise", version=value)

    @rule(worker_id=_one)
    def receive(self, worker_id: int) -> None:
        """Receive as a worker that was busy: it gets the newest version, and its answer counts."""
        if self.attends(worker_id):
            life, certain = self.lives[worker_id], self.certain(worker_id)
            wanted = self.sender.workers[worker_id].wanted
            if certain and wanted > life.version:
                # A worker that joined during a delivery may get that version first.
                while life.version < wanted:
                    version = self.ask(worker_id, Worker.receive, self.cases.slack)
                    assert version is not None, RECEIVED
                assert eventually(lambda: self.current(worker_id), self.cases.slack), LATE
            else:
                version = self.ask(worker_id, Worker.receive, 0.0)
                assert version is None or not certain, NO_NEWS
        elif worker_id in self.members & self.broken and worker_id not in self.staged:
            with suppress(SyncError):
                self.pool.call(worker_id, Worker.receive, 0.0)

    @rule(worker_id=_one)
    def stage(self, worker_id: int) -> None:
        """Stage a version, and keep it for later."""
        if self.attends(worker_id) and self.ask(worker_id, _stage_at_once):
            self.staged.add(worker_id)

    @rule(worker_id=_one, how=st.sampled_from(["commit", "refuse", "as another"]))
    @precondition(lambda self: self.lonely() and self.staged & self.members)
    def end_what_is_staged(self, worker_id: int, how: str) -> None:
        """Commit or refuse the staged version, even if newer ones were sent."""
        if worker_id not in self.staged & self.members:
            return
        self.staged.discard(worker_id)
        if how == "commit":
            self.ask(worker_id, Worker.commit_staged)
        elif how == "refuse":
            self.refused.add(worker_id)
            self.ask(worker_id, Worker.refuse_staged)
        else:
            address = self.sender.address(worker_id)
            self.pool.call(worker_id, Worker.commit_after_another, address)
            self.start_life(worker_id)

    @rule(worker_id=_one)
    def break_down(self, worker_id: int) -> None:
        """Change a model so that it fits no version."""
        if self.attends(worker_id):
            self.pool.call(worker_id, Worker.misshape)
            self.broken.add(worker_id)

    @rule(worker_id=_one)
    def hang_up(self, worker_id: int) -> None:
        """Close the receiver, which notifies the sender."""
        if worker_id in self.lives:
            self.pool.call(worker_id, Worker.hang_up)
            self.forget(worker_id)

    @rule(worker_id=_one)
    def join(self, worker_id: int) -> None:
        """Make a receiver, with a new model."""
        if worker_id in self.members:
            self.forget(worker_id)
            self.pool.call(worker_id, Worker.reset)
            self.pool.call(worker_id, Worker.connect, self.sender.address(worker_id))
            self.start_life(worker_id)
            # A scheme over a store notices it only from time to time.
            assert eventually(lambda: not self.version_of(worker_id), self.cases.slack), ANEW

    @rule(worker_id=_one)
    def remove(self, worker_id: int) -> None:
        if worker_id in self.members:
            self.members.discard(worker_id)
            self.sender.remove_worker(worker_id)

    @rule(worker_id=_one)
    def add(self, worker_id: int) -> None:
        """Add a removed worker again, as a new one."""
        if worker_id not in self.members:
            self.sender.add_worker(worker_id)
            self.members.add(worker_id)
            self.join(worker_id)

    @rule(worker_id=_one)
    @precondition(replaces)
    def kill(self, worker_id: int) -> None:
        """Kill a worker, and start another process in its place."""
        self.killed = True
        self.forget(worker_id)
        self.pool.signal(worker_id, signal.SIGKILL)
        self.pool.restart(worker_id)

    @invariant()
    def kept_promises(self) -> None:
        violations = self.recorder.check()
        assert not violations, "\n".join(map(str, violations))

    def teardown(self) -> None:
        """Let all workers return; a send must then reach each of them."""
        # A failed order has its error already.
        error = sys.exception()
        try:
            if error is None and hasattr(self, "sender"):
                self.come_back()
        except Exception as late:
            error = late
            raise
        finally:
            if isinstance(error, Exception) and not isinstance(error, HypothesisException):
                self.failures.append(error)
            self.ends.close()

    def come_back(self) -> None:
        if self.begun():
            self.end_send(0.0)
        for worker_id in _WORKERS:
            if worker_id not in self.members:
                self.add(worker_id)
            elif not self.attends(worker_id):
                self.join(worker_id)
        self.recorder.expect(_WORKERS)
        self.send_to(set(_WORKERS))
        self.kept_promises()
        states = {i: status.state for i, status in self.sender.workers.items()}
        assert all(map(self.current, states)), states

    def attends(self, worker_id: int) -> bool:
        """Return whether a worker can receive now."""
        absent = self.staged | self.broken
        return worker_id in self.members & self.lives.keys() - absent

    def certain(self, worker_id: int) -> bool:
        """Return whether a worker that receives will get the newest version, whatever others do."""
        return self.lonely() and worker_id not in self.refused | self.unsure

    def current(self, worker_id: int) -> bool:
        return self.sender.workers[worker_id].state is WorkerState.CURRENT

    def version_of(self, worker_id: int) -> int:
        """Return the worker's version according to the sender."""
        return self.sender.workers[worker_id].version

    def forget(self, worker_id: int) -> None:
        """Record that a worker has no receiver."""
        self.lives.pop(worker_id, None)
        self.staged.discard(worker_id)
        self.broken.discard(worker_id)
        self.refused.discard(worker_id)

    def start_life(self, worker_id: int) -> None:
        self.lives[worker_id] = WorkerRecorder(self.recorder, worker_id, lambda: self.looked)

    def next_version(self) -> int:
        """Set the model's values to the next version."""
        # Ranks of a trainer count alone: a version that one of them could not send has its number.
        joined = self.cases.can("joined")
        self.value = value = 1 + (self.value if joined else self.sender.version)
        fill(self.policy, float(value))
        return value

    def send_to(self, to: set[int]) -> None:
        """Send to receiving workers, and let them receive."""
        self.start_send(to, self.cases.slack)
        # A worker may have staged a version before, which the others have committed.
        held = 0 if self.lonely() else self.sender.version
        calls = [self.pool.submit(i, _receive, self.cases.slack, held) for i in sorted(to)]
        received = ended(calls, "receive() of workers that a version is for")
        for worker_id, first in zip(sorted(to), received, strict=True):
            version = first
            while self.cases.can("joined") and version and version < self.sender.version:
                # All ranks had sent it when the worker connected.
                version = self.pool.call(worker_id, Worker.receive, self.cases.slack)
            assert version is None or version >= self.sender.version, (
                f"receive() in worker {worker_id} returned version {version} after send() had "
                f"returned for version {self.sender.version}: from then on, receive() must return "
                "that version or a newer one; a transport that pushes has to ask the sender once"
            )
            self.look(worker_id)
        self.end_send(None)

    def start_send(self, to: set[int], seconds: float | None) -> None:
        value = self.next_version()
        deadline = None if seconds is None else seconds + self.cases.slack
        self.recorder.send(value, digest=f"{float(value)}", deadline=deadline)
        self.unsure -= to
        self.refused -= to
        self.pending = self.sender.send_async(worker_ids=sorted(to), version=value)

    def end_send(self, seconds: float | None) -> None:
        pending, self.pending = self.pending, None
        assert pending is not None
        try:
            report = pending.wait(seconds)
        except SendError as error:
            report = error.report
        self.recorder.report(report)
        self.recorder.states(self.sender.workers)

    def ask(self, worker_id: int, function: Any, *arguments: Any) -> Any:
        """Call a function on a worker, and record its version afterwards."""
        answer = self.pool.call(worker_id, function, *arguments)
        self.look(worker_id)
        self.recorder.states(self.sender.workers)
        return answer

    def look(self, worker_id: int) -> None:
        """Record the version of a worker, as a commit if it has changed."""
        version, values = self.pool.call(worker_id, _held)
        self.looked = " and ".join(str(value) for value in sorted(values))
        life = self.lives[worker_id]
        if version != life.version:
            life.committed(version)
        else:
            life.looked()


def _receive(worker: Worker, seconds: float, version: int) -> int | None:
    """Receive; once more where a version comes that is older than this one."""
    received = worker.receive(seconds)
    return worker.receive(seconds) if received is not None and received < version else received


def _stage_at_once(worker: Worker) -> int | None:
    assert worker.receiver is not None
    return worker.receiver.stage(0.0)


def _held(worker: Worker) -> tuple[int, set[float]]:
    assert worker.receiver is not None
    return worker.receiver.version, worker.values()
