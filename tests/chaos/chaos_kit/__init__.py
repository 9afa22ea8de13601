"""Every fault on every scheme: a table of cases, one runner for all, and the outcome of each.

``make chaos`` runs all of it; a sample runs with the tests. A third party's scheme is one more
`Subject`.
"""

from chaos_kit.cases import MODES, Case, cases_of, sample
from chaos_kit.conformance import ChaosConformance
from chaos_kit.outcome import Outcome, Verdict
from chaos_kit.runner import Runner
from chaos_kit.sequences import sequence_of
from chaos_kit.subjects import SUBJECTS, Subject
from chaos_kit.trials import TRIALS, Trial

__all__ = [
    "MODES",
    "SUBJECTS",
    "TRIALS",
    "Case",
    "ChaosConformance",
    "Outcome",
    "Runner",
    "Subject",
    "Trial",
    "Verdict",
    "cases_of",
    "sample",
    "sequence_of",
]
