"""The tests that docs/reliability.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
SUITE = ROOT / "plugins" / "testing" / "src" / "sync_testing" / "schemes"


def test_each_fault_has_its_test() -> None:
    named = re.findall(r"`(\w+/\w+\.py)::(?:(\w+)::)?(\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert len(named) > 40
    suite = "".join(path.read_text() for path in SUITE.glob("*.py"))
    for path, case, name in named:
        text = (ROOT / "tests" / path).read_text()
        # A class of the suite's cases has tests that its file does not show.
        assert not case or f"class {case}(" in text, f"{path} has no {case}"
        assert f"def {name}(" in (suite if case else text), f"{path} has no {name}"
