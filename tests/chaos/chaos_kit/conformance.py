"""A sample of the matrix of faults as a test class, the same unless ``CHAOS_SEED`` is set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from chaos_kit.cases import Case, sample
from chaos_kit.plan import Plan
from chaos_kit.runner import Runner
from sync_testing.cases import Conformance

_SEED = int(os.environ.get("CHAOS_SEED", "0"))


class _Runners(dict[str, Runner]):
    def __missing__(self, subject: str) -> Runner:
        self[subject] = Runner(subject)
        return self[subject]


@pytest.mark.timeout(120)
class ChaosConformance(Conformance):
    """Inherit and set `counts`.

    Attributes:
        counts: how many cases of each scheme, as it is called in `SUBJECTS`.

    Example:
        >>> class TestFaults(ChaosConformance):  # doctest: +SKIP
        ...     counts = {"shm": 8, "mp": 4}
    """

    counts: ClassVar[Mapping[str, int]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each case."""
        if "case" not in metafunc.fixturenames:
            return
        cases = [case for name, count in self.counts.items() for case in sample(name, _SEED, count)]
        metafunc.parametrize("case", cases, ids=lambda case: case.key)

    @pytest.fixture(scope="class")
    @classmethod
    def runners(cls) -> Iterator[dict[str, Runner]]:
        """One for each scheme, made when it is first needed."""
        made = _Runners()
        yield made
        for runner in made.values():
            runner.close()

    def test_as_documented(self, case: Case, runners: dict[str, Runner]) -> None:
        """A good send, one with the fault, and another good one."""
        outcome = runners[case.subject].run(Plan.of(case))
        assert outcome.ok, (f"CHAOS_SEED={_SEED}", *outcome.complaints)
