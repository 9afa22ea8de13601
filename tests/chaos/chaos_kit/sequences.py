"""Random sequences of faults: one sender, several rounds, and workers that are hurt again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from chaos_kit.cases import MODES, WORKERS, fits
from chaos_kit.plan import Plan
from chaos_kit.subjects import SUBJECTS
from chaos_kit.trials import TRIALS

_ROUNDS = 5


def sequence_of(seed: int, subjects: Sequence[str]) -> Plan:
    """The plan of a seed: a scheme, a way to use it, and faults, every second round at least.

    Example:
        >>> sequence_of(3, ["shm", "mp"]) == sequence_of(3, ["shm", "mp"])
        True
    """
    random_ = random.Random(seed)
    name = subjects[seed % len(subjects)]
    subject = SUBJECTS[name]
    modes = [mode for mode in MODES if fits(subject, TRIALS["none"], mode)]
    mode = random_.choice(modes)
    names = [trial for trial in TRIALS if fits(subject, TRIALS[trial], mode)]
    faults: list[tuple[str, tuple[int, ...]]] = [("none", ())]
    for _ in range(_ROUNDS):
        hurt = random_.sample(range(WORKERS), random_.randint(1, WORKERS))
        faults.append((random_.choice(names), tuple(sorted(hurt))))
    faults.append(("none", ()))
    return Plan.make(f"{name} | sequence {seed}", name, mode, faults)
