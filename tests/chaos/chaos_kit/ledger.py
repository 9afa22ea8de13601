"""Compares the result of a send with the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from chaos_kit.outcome import Complaint, Verdict
from chaos_kit.plan import Round
from sync_core import CapacityError, SendReport, WorkerTimeoutError
from sync_testing.faults import InjectedFaultError

Values = Mapping[int, list[float]]


class Ledger:
    """The versions that every worker should have, and the complaints.

    Args:
        collective: whether all workers are reached together, which takes new connections when one
            of them has failed.

    Attributes:
        round: the send that is under way.
        complaints: what was wrong.
    """

    def __init__(self, *, collective: bool = False) -> None:
        self._collective = collective
        self.round = Round(0, "none")
        self.complaints: list[Complaint] = []
        self._has: dict[int, float] = {}
        self._owed: dict[int, float] = {}

    def complain(self, verdict: Verdict, detail: str) -> None:
        """Write down what is wrong."""
        where = f"version {self.round.version}, {self.round.name}: "
        self.complaints.append(Complaint(verdict, where + detail))

    def compare(self, report: SendReport | None, failure: Exception | None, values: Values) -> None:
        """Return what a send that reaches workers has done.

        Args:
            report: what it reported.
            failure: what it raised instead.
            values: what the models of the workers that live hold.
        """
        if report is None:
            # Where every slot is read there has to be one more, which takes a descriptor.
            if self.round.trial.squeeze != "trainer" or not isinstance(failure, CapacityError):
                self.complain(Verdict.OTHER, f"the send raised {failure!r}")
            self._check_nothing_sent(values)
            self._look(values)
            return
        if report.version != self.round.version:
            self.complain(Verdict.OTHER, f"the report is of version {report.version}")
        self._check_fates(values)
        self._owed = {}
        for worker_id in report.workers:
            hurt = worker_id in self.round.worker_ids
            wanted = self.round.trial.error if hurt else None
            result = report.workers[worker_id]
            silent = isinstance(result.error, WorkerTimeoutError)
            if (hurt and self.round.trial.lenient) or (silent and self._cannot_connect):
                # A worker that could not look at an offer still has it, and may accept it later.
                if silent:
                    self._owed[worker_id] = float(report.version)
                continue
            if wanted is None and result.error is not None:
                self.complain(Verdict.OTHER, f"worker {worker_id} failed: {result.error!r}")
            elif wanted is not None and not isinstance(result.error, wanted):
                self.complain(
                    Verdict.OTHER,
                    f"worker {worker_id} has {result.error!r}, not {wanted.__name__}",
                )
        self._check_updated(report, values)
        self._look(values)

    def compare_nothing_sent(self, failure: Exception | None, values: Values) -> None:
        """Return what a send has done that was to raise."""
        if not isinstance(failure, InjectedFaultError):
            self.complain(Verdict.OTHER, f"the send raised {failure!r}, not what was injected")
        self._check_nothing_sent(values)
        self._look(values)

    def compare_replaced(self, worker_id: int, held: list[float]) -> None:
        """Return what a worker has that took the place of one that was killed."""
        if held != [float(self.round.version)]:
            self.complain(Verdict.LOST, f"worker {worker_id} was replaced, and has {held}")
        self._look({worker_id: held})

    @property
    def _cannot_connect(self) -> bool:
        return self._collective and self.round.trial.squeeze == "trainer"

    def _old(self, worker_id: int) -> tuple[list[float], ...]:
        """Return what a worker may have that gets nothing in this round."""
        had = self._has.get(worker_id, 0.0)
        return [had], [self._owed.get(worker_id, had)]

    def _check_nothing_sent(self, values: Values) -> None:
        for worker_id, held in values.items():
            if held not in self._old(worker_id):
                self.complain(Verdict.OTHER, f"worker {worker_id} has {held}, which was not sent")

    def _check_updated(self, report: SendReport, values: Values) -> None:
        for worker_id in report.updated:
            held = values.get(worker_id)
            if held is not None and held != [float(report.version)] and len(held) == 1:
                self.complain(Verdict.LOST, f"worker {worker_id} confirmed, and has {held}")

    def _check_fates(self, values: Values) -> None:
        for worker_id in self.round.worker_ids:
            if worker_id not in values:
                continue
            old, new = self._old(worker_id), ([float(self.round.version)],)
            fate = "old or new" if self._cannot_connect else self.round.trial.fate
            allowed = {"old": old, "new": new}.get(fate, old + new)
            if values[worker_id] not in allowed and len(values[worker_id]) == 1:
                self.complain(
                    Verdict.OTHER,
                    f"worker {worker_id} has {values[worker_id]}, not {fate}",
                )

    def _look(self, values: Values) -> None:
        for worker_id, held in values.items():
            if len(held) != 1:
                self.complain(Verdict.TORN, f"worker {worker_id} has {held}")
            self._has[worker_id] = held[0]
