"""The page of benchmarks is what its script writes from the results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_results() -> None:
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs" / "benchmarks" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["page"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written == module.page(module.results()), "type: python docs/benchmarks/page.py"
