"""The cases: every fault, on a scheme, in each way to send and receive, for one worker or more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos_kit.subjects import SUBJECTS, Subject
from chaos_kit.trials import TRIALS, Trial

#: How a version is sent and received.
MODES = ("blocking", "async", "background", "zero_copy")
#: How many of three workers are hurt.
WORKERS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix.

    Args:
        subject: the scheme, as it is called in `SUBJECTS`.
        trial: the fault, as it is called in `TRIALS`.
        mode: one of `MODES`.
        hurt: how many workers are.
    """

    subject: str
    trial: str
    mode: str
    hurt: int

    @property
    def key(self) -> str:
        """Return what tells it from the others."""
        return f"{self.subject} | {self.trial} | {self.mode} | {self.hurt}"

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers that are hurt."""
        return tuple(range(self.hurt))


def fits(subject: Subject, trial: Trial, mode: str) -> bool:
    """Return whether a fault can strike a scheme that is used in one way."""
    if trial.needs_processes and not subject.processes:
        return False
    if mode == "zero_copy" and trial.copies:
        return False
    # The thread of a background receiver is never about to ask: it always does.
    if mode == "background" and any(fault.point == "receive" for fault in trial.faults):
        return False
    return mode not in ("background", "zero_copy") or mode in subject.capabilities


def cases_of(name: str) -> Iterator[Case]:
    """Every case of a scheme.

    Example:
        >>> sum(case.trial == "kill in commit" for case in cases_of("shm"))
        6
    """
    for trial_name, trial in TRIALS.items():
        for mode in MODES:
            if fits(SUBJECTS[name], trial, mode):
                # The worker makes no difference where a fault strikes the trainer.
                counts = range(1, WORKERS + 1) if _is_for_workers(trial) else (WORKERS,)
                yield from (Case(name, trial_name, mode, count) for count in counts)


def sample(name: str, seed: int, count: int) -> Sequence[Case]:
    """Some of the cases of a scheme, the same for the same seed, as many faults as possible.

    Of workers that are killed no more than one at a time, since a new one takes seconds.
    """
    shuffled = [c for c in cases_of(name) if c.hurt == 1 or TRIALS[c.trial].fate != "gone"]
    random.Random(f"{seed} {name}").shuffle(shuffled)
    seen: Counter[str] = Counter()
    rank: dict[Case, int] = {}
    for case in shuffled:
        rank[case] = seen[case.trial]
        seen[case.trial] += 1
    return sorted(shuffled, key=rank.__getitem__)[:count]


def _is_for_workers(trial: Trial) -> bool:
    if trial.hook is not None:
        return trial.hook == "apply_weights"
    if trial.squeeze != "nobody":
        return trial.squeeze == "workers"
    return any(f.point != "transfer" or f.action in ("kill", "stop") for f in trial.faults)
