"""The glossary has each term once, and names what exists."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (?P<term>[^|`]+) \| (?P<meaning>[^|]+) \|(?: `(?P<where>[^`|]+)`)? \|$")
_LINES = [
    line
    for line in (ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("| term", "|--"))
]
_ROWS = [found for line in _LINES if (found := _ROW.match(line))]


def test_each_term_is_there_once() -> None:
    assert len(_ROWS) == len(_LINES) > 50
    terms = [row["term"] for row in _ROWS]
    assert sorted(terms, key=str.casefold) == sorted({*terms}, key=str.casefold)


@pytest.mark.parametrize("where", sorted({row["where"] for row in _ROWS if row["where"]}))
def test_where_a_term_is_defined(where: str) -> None:
    if "/" in where:
        assert (ROOT / where).exists()
    else:
        pkgutil.resolve_name(where)
