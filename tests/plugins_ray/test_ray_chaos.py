"""A sample of the matrix of faults over Ray."""

from __future__ import annotations

import pytest

from sync_core.testing.chaos import Case, ChaosConformance

# They run, so that it is seen when they begin to work.
UNRELIABLE = pytest.mark.xfail(
    reason="an actor that is to be stopped answers all the same; docs/decisions/0015-faults.md",
    strict=False,
)


class TestFaults(ChaosConformance):
    counts = {"ray": 5}

    @pytest.fixture(autouse=True)
    def unreliable(self, case: Case, request: pytest.FixtureRequest) -> None:
        if case.trial.startswith("stop"):
            request.applymarker(UNRELIABLE)
