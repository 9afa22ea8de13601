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

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: Any, name: str) -> list[Any] | None:
        """Make no items of the other cases, of which there are thousands."""
        if not isinstance(collector, pytest.Class) or not name.startswith("test"):
            return None
        self.module = collector.module
        self.caught_by = self.module.CAUGHT_BY
        caught_by = self.caught_by[collector.name]
        chosen = name in self.caught_by.values() if caught_by == "" else name == caught_by
        return None if chosen else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Function) -> None:
        if "failed" in self.outcomes[item.nodeid.split("::")[1]]:
            pytest.skip("caught already")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes[report.nodeid.split("::")[1]].add(report.outcome)


@pytest.mark.parametrize(
    ("kind", "least"), [("schemes", 50), ("layers", 15), ("stores", 7), ("increments", 6)]
)
def test_every_mutant_is_caught(
    torch_modules: object, pytester: pytest.Pytester, kind: str, least: int
) -> None:
    chosen = Chosen()
    path = FOLDER / f"{kind}.py"
    pytester.inline_run(
        path, "-p", "no:cacheprovider", "-q", "--tb=no", plugins=[chosen, torch_modules]
    )
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
