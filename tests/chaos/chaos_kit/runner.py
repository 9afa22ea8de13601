"""Carries out plans on the workers of a scheme, and compares the results with the table."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from chaos_kit import worker as hosted
from chaos_kit.cases import WORKERS
from chaos_kit.ledger import Ledger
from chaos_kit.outcome import Outcome, Verdict
from chaos_kit.plan import Plan, Round
from chaos_kit.resources import Resources
from chaos_kit.subjects import SUBJECTS
from sync_core import Sender, SendError, SendReport, WorkerLostError, WorkerTimeoutError
from sync_testing.faults import Faulty, InjectedFaultError, few_descriptors
from sync_testing.recording import Recorder
from sync_testing.schemes import SharedGroup, borrow_pool

# How much longer than its deadline a call may take on a machine that is busy, in seconds.
_GRACE = 3.0
# A call to a worker that takes longer hangs.
_PATIENCE = 30.0
_IDS = tuple(range(WORKERS))
# The verdict on each promise that was not kept.
_VERDICTS = {
    "an end": Verdict.HANG,
    "whole": Verdict.TORN,
    "honest answers": Verdict.LOST,
    "up to date": Verdict.LOST,
}


class Runner:
    """Runs the plans of one scheme, with the same workers where those live.

    Args:
        subject: the scheme, as it is called in `SUBJECTS`.
        histories: the folder in which the history of each run is kept; None to keep none.
    """

    def __init__(self, subject: str, histories: Path | None = None) -> None:
        self.histories = histories
        self.subject = SUBJECTS[subject]
        self._stack = ExitStack()
        self._pool: SharedGroup = self._stack.enter_context(borrow_pool(self.subject.group_class))
        self._resources = Resources(self._pool, _IDS, self.subject.late_connections)

    def run(self, plan: Plan) -> Outcome:
        """Carry out a plan."""
        begin = time.monotonic()
        ledger = Ledger(collective=self.subject.collective)
        self._pool.make_ready()
        folder = TemporaryDirectory()
        name = re.sub(r"[^a-z0-9]+", "-", plan.key) + ".jsonl"
        run = _Run(plan, self._pool, ledger, Path(self.histories or folder.name, name))
        try:
            run.go()
            for violation in run.recorder.check():
                ledger.complain(_VERDICTS.get(violation.rule, Verdict.OTHER), str(violation))
        except TimeoutError as error:
            ledger.complain(Verdict.HANG, f"a call to a worker took {_PATIENCE:g} s: {error!r}")
        except Exception as error:
            ledger.complain(Verdict.OTHER, f"the run broke off: {error!r}")
        finally:
            run.end()
            run.recorder.close()
            folder.cleanup()
        if ledger.complaints or not run.whole:
            self._pool.stop()
            self._resources.forget()
        else:
            for leak in self._resources.check(replaced=run.replaced):
                ledger.complain(Verdict.LEAK, leak)
        seconds = time.monotonic() - begin
        complaints = tuple(ledger.complaints)
        return Outcome(plan.key, plan.subject_name, plan.trials, seconds, complaints)

    def close(self) -> None:
        """End the workers, unless they are borrowed."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Run:
    def __init__(self, plan: Plan, pool: SharedGroup, ledger: Ledger, history: Path) -> None:
        history.unlink(missing_ok=True)
        self.recorder = Recorder(history)
        self.replaced: set[int] = set()
        self.whole = True
        self._plan = plan
        self._pool = pool
        self._ledger = ledger
        self._pids: dict[int, int] = {}
        self._there = list(_IDS)
        self._model = hosted.make_model()
        self._scheme = Faulty(plan.subject.scheme, *plan.faults, find_pid=lambda i: self._pids[i])
        self._sender = Sender(
            self._scheme,
            self._model,
            num_workers=WORKERS,
            layers=[*plan.layers, *plan.proofs],
            zero_copy=plan.mode == "zero_copy",
            timeout=plan.subject.timeout,
            **plan.subject.options,
        )

    def go(self) -> None:
        self._connect(_IDS)
        for round_ in self._plan.rounds:
            # Where workers cannot be replaced, none may be left to send to.
            if not self._there:
                return
            self._ledger.round = round_
            self._strike(round_)
            self._heal(round_)

    def end(self) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._sender.close()
        if self.whole:
            for worker_id in self._there:
                self._pool.submit(worker_id, hosted.leave).exception(_PATIENCE)

    def _connect(self, worker_ids: Iterable[int]) -> None:
        background = self._plan.mode == "background"
        for worker_id in worker_ids:
            address = self._sender.address(worker_id)
            self._pool.call(worker_id, hosted.connect, address, background, self.recorder.path)
            self._pids[worker_id] = self._pool.call(worker_id, lambda _: os.getpid())

    def _strike(self, round_: Round) -> None:
        trial, version = round_.trial, round_.version
        if round_.name == "none":
            self.recorder.expect(self._there)
        report, calls, failure = self._send(version, round_)
        for fault in self._scheme.missed:
            self._ledger.complain(Verdict.OTHER, f"the fault did not strike: {fault}")
        if trial.stops:
            for worker_id in round_.worker_ids:
                os.kill(self._pids[worker_id], signal.SIGCONT)
        self._finish(calls, round_)
        values = {
            i: self._pool.call(i, hosted.values)
            for i in self._there
            if not (trial.fate == "gone" and i in round_.worker_ids)
        }
        if trial.sends:
            self._ledger.compare(report, failure, values)
            self.recorder.states(self._sender.workers)
            return
        self._ledger.compare_nothing_sent(failure, values)
        version += trial.burns
        self._ledger.round = Round(version, "none")
        report, calls, failure = self._send(version, self._ledger.round)
        self._finish(calls, self._ledger.round)
        values = {i: self._pool.call(i, hosted.values) for i in self._there}
        self._ledger.compare(report, failure, values)

    def _send(
        self, version: int, round_: Round
    ) -> tuple[SendReport | None, dict[int, Future[Any]], Exception | None]:
        hosted.fill(self._model, float(version))
        calls: dict[int, Future[Any]] = {}
        waits = self._plan.mode in ("blocking", "zero_copy")
        if waits:
            calls = self._receive(version, round_)
            # They must be waiting for it.
            time.sleep(0.03)
        limit = self._limit(round_)
        digest = str(float(version))
        self.recorder.send(version, digest=digest, deadline=limit)
        begin = time.monotonic()
        report: SendReport | None = None
        failure: Exception | None = None
        try:
            with ExitStack() as stack:
                if round_.trial.squeeze == "trainer":
                    stack.enter_context(few_descriptors())
                if waits:
                    report = self._sender.send(worker_ids=self._there, timeout=limit)
                else:
                    pending = self._sender.send_async(worker_ids=self._there, timeout=limit)
                    calls = self._receive(version, round_)
                    report = pending.wait()
        except SendError as error:
            if isinstance(error.__cause__, InjectedFaultError):
                failure = error.__cause__
            else:
                report = error.report
        except Exception as error:
            failure = error
        if report is None:
            self.recorder.add("raise", version=version)
        else:
            self.recorder.report(report)
        seconds = time.monotonic() - begin
        if seconds > limit + _GRACE:
            self._ledger.complain(Verdict.HANG, f"the send took {seconds:.1f} s")
        return report, calls, failure

    def _limit(self, round_: Round) -> float:
        # A version that is not sent is not received.
        silent = round_.trial.error is WorkerTimeoutError or not round_.trial.sends
        return self._plan.subject.deadline if silent else self._plan.subject.timeout

    def _receive(self, version: int, round_: Round) -> dict[int, Future[Any]]:
        squeezed = round_.worker_ids if round_.trial.squeeze == "workers" else ()
        seconds = self._limit(round_) + 0.2
        return {
            i: self._pool.submit(
                i, hosted.receive_until, version, seconds, 0 if i in squeezed else None
            )
            for i in self._there
        }

    def _finish(self, calls: dict[int, Future[Any]], round_: Round) -> None:
        """Wait until the workers have stopped receiving."""
        for worker_id, call in calls.items():
            failure = call.exception(_PATIENCE)
            if failure is None:
                continue
            expected = worker_id in round_.worker_ids and (
                isinstance(failure, WorkerLostError)
                if round_.trial.fate == "gone"
                else isinstance(failure.__cause__, round_.trial.raises)
            )
            if not expected:
                self._ledger.complain(Verdict.OTHER, f"worker {worker_id}: {failure}")

    def _heal(self, round_: Round) -> None:
        """Replace killed workers; the new ones have the newest version at once."""
        if round_.trial.fate != "gone":
            return
        for worker_id in round_.worker_ids:
            self._pool.restart(worker_id)
        self._connect(round_.worker_ids)
        self.replaced.update(round_.worker_ids)
        seconds = self._plan.subject.timeout
        for worker_id in round_.worker_ids:
            self._pool.call(worker_id, hosted.receive_until, round_.version, seconds, None)
            values = self._pool.call(worker_id, hosted.values)
            self._ledger.compare_replaced(worker_id, values)
