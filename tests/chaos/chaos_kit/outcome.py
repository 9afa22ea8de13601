"""Outcomes of cases, and the journal that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any


class Verdict(StrEnum):
    """The verdicts, the worst first."""

    HANG = "hang"
    TORN = "torn read"
    LOST = "lost update"
    LEAK = "leak"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that is not as documented."""

    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case.

    Args:
        key: the case.
        subject: the scheme.
        trials: the faults.
        seconds: how long it took.
        complaints: what was not as documented.
        day: when it was; today, where it is not said.
    """

    key: str
    subject: str
    trials: tuple[str, ...]
    seconds: float
    complaints: tuple[Complaint, ...] = field(default=())
    day: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    @property
    def ok(self) -> bool:
        """Return whether all was as documented."""
        return not self.complaints

    def has(self, verdict: Verdict) -> bool:
        """Return whether there was something of a kind."""
        return any(complaint.verdict == verdict for complaint in self.complaints)


class Journal:
    """Outcomes in a file, a line each, so that a run can be gone on with where it was broken off.

    Args:
        path: the file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, outcome: Outcome) -> None:
        """Write one down."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    def read(self) -> list[Outcome]:
        """All that there are, the last one of each case."""
        if not self.path.exists():
            return []
        lines = map(json.loads, self.path.read_text().splitlines())
        return list({line["key"]: _outcome(line) for line in lines}.values())


def table(outcomes: Iterable[Outcome]) -> str:
    """A row for each scheme and fault, as Markdown."""
    rows: dict[tuple[str, str], list[int]] = {}
    for outcome in outcomes:
        for trial in outcome.trials:
            row = rows.setdefault((outcome.subject, trial), [0] * (1 + len(Verdict)))
            row[0] += 1
            for column, verdict in enumerate(Verdict, start=1):
                row[column] += outcome.has(verdict)
    heads = ["scheme", "fault", "runs", *(f"{verdict}s" for verdict in list(Verdict)[:-1]), "other"]
    lines = [heads, ["---", "---", *["---:"] * (len(heads) - 2)]]
    lines += [[*names, *map(str, counts)] for names, counts in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _outcome(line: dict[str, Any]) -> Outcome:
    complaints = tuple(Complaint(Verdict(c["verdict"]), c["detail"]) for c in line["complaints"])
    return Outcome(**{**line, "trials": tuple(line["trials"]), "complaints": complaints})
