"""The plan of one run: rounds, each a send, some of which meet a fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from chaos_kit.cases import Case
from chaos_kit.subjects import SUBJECTS, Subject
from chaos_kit.trials import TRIALS, Trial
from sync_testing.faults import Fault, Raising


@dataclass(frozen=True, slots=True)
class Round:
    """One send.

    Args:
        version: the version that it makes.
        name: the fault, as it is called in `TRIALS`.
        worker_ids: the workers that it strikes.
    """

    version: int
    name: str
    worker_ids: tuple[int, ...] = ()

    @property
    def trial(self) -> Trial:
        """The fault."""
        return TRIALS[self.name]


@dataclass(frozen=True, slots=True)
class Plan:
    """All sends of one sender.

    Args:
        key: what tells it from others.
        subject_name: the scheme, as it is called in `SUBJECTS`.
        mode: how is sent and received.
        rounds: the sends.
    """

    key: str
    subject_name: str
    mode: str
    rounds: tuple[Round, ...]

    @classmethod
    def make(
        cls, key: str, subject: str, mode: str, faults: Iterable[tuple[str, tuple[int, ...]]]
    ) -> Plan:
        """Number the versions: a send that fails while it packs has used one up."""
        rounds, version = [], 0
        for name, worker_ids in faults:
            version += 1
            rounds.append(Round(version, name, worker_ids))
            version += TRIALS[name].burns
        return cls(key, subject, mode, tuple(rounds))

    @classmethod
    def of(cls, case: Case) -> Plan:
        """A good send, one with the fault, and another good one."""
        faults = [("none", ()), (case.trial, case.worker_ids), ("none", ())]
        return cls.make(case.key, case.subject, case.mode, faults)

    @property
    def subject(self) -> Subject:
        """The scheme."""
        return SUBJECTS[self.subject_name]

    @property
    def trials(self) -> tuple[str, ...]:
        """The faults that it meets."""
        return tuple(r.name for r in self.rounds if r.worker_ids)

    @property
    def proofs(self) -> list[str]:
        """The layers without which a fault would not be noticed."""
        return ["checksum"] if any(r.trial.verified for r in self.rounds) else []

    @property
    def faults(self) -> Sequence[Fault]:
        """Return the faults of all rounds."""
        deadline = self.subject.deadline
        found = (r.trial.faults_for(r.version, r.worker_ids, deadline) for r in self.rounds)
        return list(chain.from_iterable(found))

    @property
    def layers(self) -> Sequence[Raising]:
        """Return the workers of all rounds."""
        found: Iterable[Any] = (r.trial.layers_for(r.version, r.worker_ids) for r in self.rounds)
        return list(chain.from_iterable(found))
