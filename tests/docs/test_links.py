"""Links from page to page name the file, so that they also work in a repository's browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TARGET = re.compile(r"\]\(([^()\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if "_build" not in path.relative_to(ROOT).parts
)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """Pages of the reference are generated, so that links to them work in the built pages only."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    targets = ["".join(found) for found in _TARGET.findall(text)]
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    dead = [
        file
        for file in files
        if file and "generated/" not in file and not (page.parent / file).is_file()
    ]
    assert not dead, "write the whole name of the file, such as how-to/observe.md"


def test_the_tests_that_the_security_page_names() -> None:
    named = set(re.findall(r"`(\w+/test_\w+\.py)`", (ROOT / "SECURITY.md").read_text()))
    assert named
    assert not [name for name in named if not (ROOT / "tests" / name).is_file()]
