"""Every fault on every scheme: a table of cases, one runner for all, and what became of each.

``make chaos`` runs all of it; a sample runs with the tests. A scheme of somebody else's is one more
`Subject`.
"""

from sync_core.testing.chaos.cases import MODES, Case, cases_of, sample
from sync_core.testing.chaos.conformance import ChaosConformance
from sync_core.testing.chaos.outcome import Outcome, Verdict
from sync_core.testing.chaos.runner import Runner
from sync_core.testing.chaos.sequences import sequence_of
from sync_core.testing.chaos.subjects import SUBJECTS, Subject
from sync_core.testing.chaos.trials import TRIALS, Trial

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
