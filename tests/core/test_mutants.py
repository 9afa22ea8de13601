"""The conformance classes catch plugins that are broken on purpose, each by the case it names."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.timeout(300)

FOLDER = Path(__file__).with_name("mutants")


class Chosen:
    """Runs of each class the case that is to catch it, and of the baseline all of these.

    A case with several parameters has caught a mutant with the first that fails; the others would
    tell nothing more.
    """

    def __init__(self) -> None:
        self.caught_by: dict[str, str] = {}
        self.outcomes: defaultdict[str, set[str]] = defaultdict(set)
        self.module: Any = None

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        self.module = items[0].module
        self.caught_by = self.module.CAUGHT_BY
        cases = set(self.caught_by.values())
        items[:] = [item for item in items if item.originalname in self.cases_of(item, cases)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Function) -> None:
        if "failed" in self.outcomes[item.nodeid.split("::")[1]]:
            pytest.skip("caught already")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes[report.nodeid.split("::")[1]].add(report.outcome)

    def cases_of(self, item: pytest.Function, cases: set[str]) -> set[str]:
        assert item.cls is not None
        caught_by = self.caught_by[item.cls.__name__]
        return {caught_by} if caught_by else cases


@pytest.mark.parametrize(
    ("kind", "least"), [("schemes", 50), ("layers", 15), ("stores", 7), ("increments", 6)]
)
def test_every_mutant_is_caught(pytester: pytest.Pytester, kind: str, least: int) -> None:
    chosen = Chosen()
    path = FOLDER / f"{kind}.py"
    pytester.inline_run(path, "-p", "no:cacheprovider", "-q", "--tb=no", plugins=[chosen])
    chosen.module.released.set()
    while chosen.module.__dict__.get("descriptors"):
        os.close(chosen.module.descriptors.pop())
    for file in chosen.module.__dict__.get("files", ()):
        file.unlink(missing_ok=True)
    outcomes = chosen.outcomes
    healthy = [name for name in outcomes if name.startswith("TestBaseline")]
    survivors = {
        name: chosen.caught_by[name]
        for name in chosen.caught_by
        if name not in healthy and "failed" not in outcomes[name]
    }
    assert not survivors
    assert len(outcomes) - len(healthy) >= least
    assert healthy
    assert all("failed" not in outcomes[name] for name in healthy)
