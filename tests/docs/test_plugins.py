"""The table of docs/plugins.md is that of the metadata, and of results with the present suite."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import sync_testing
from sync_testing.report import read_report

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT: dict[str, Any] = runpy.run_path(str(DOCS / "plugin_table.py"))
# Those of this repository; a developer may have others.
OURS = {
    *("sync-plugin-dist", "sync-plugin-ray", "sync-plugin-scale", "sync-plugin-std"),
    *("sync-plugin-store", "sync-plugin-torchrl", "sync-plugin-trl", "sync-plugin-verl"),
    "sync-plugin-vllm",
}


def test_the_table_is_that_of_the_metadata() -> None:
    text = (DOCS / "plugins.md").read_text(encoding="utf-8")
    remedy = "type: python docs/plugin_table.py"
    assert SCRIPT["with_table"](text, OURS) == text, remedy
    rows = [*SCRIPT["rows"](OURS)]
    assert {row[2].strip("`") for row in rows} == OURS
    assert not [row for row in rows if row[4] == "not run"], f"{remedy} --run NAME"


def test_the_results_are_those_of_the_present_suite() -> None:
    version, results = read_report(SCRIPT["RESULTS"])
    assert version == sync_testing.__version__, "type: python docs/plugin_table.py --run"
    assert {result.verdict for result in results} == {"passed"}
    assert all(result.counts["passed"] > 20 for result in results)
