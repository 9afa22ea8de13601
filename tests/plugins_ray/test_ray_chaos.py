"""A sample of the matrix of faults, the same unless ``CHAOS_SEED`` is set."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sync_core.testing.chaos import Case, Runner, sample
from sync_core.testing.chaos.plan import Plan

pytestmark = pytest.mark.timeout(120)

SEED = int(os.environ.get("CHAOS_SEED", "0"))
CASES = [pytest.param(case, id=case.key) for case in sample("ray", SEED, 5)]


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, Runner]]:
    made: dict[str, Runner] = {}
    yield made
    for runner in made.values():
        runner.close()


@pytest.mark.parametrize("case", CASES)
def test_as_documented(case: Case, runners: dict[str, Runner]) -> None:
    if case.subject not in runners:
        runners[case.subject] = Runner(case.subject)
    outcome = runners[case.subject].run(Plan.of(case))
    assert outcome.ok, (f"CHAOS_SEED={SEED}", *outcome.complaints)
