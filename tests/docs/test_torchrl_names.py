"""The page for users of TorchRL has each of its names."""

from __future__ import annotations

import re
from pathlib import Path

NAMES = Path(__file__).with_name("torchrl_names.txt")
PAGE = Path(__file__).parents[2] / "docs" / "coming-from-torchrl.md"


def test_every_name_of_torchrl_is_in_a_first_column() -> None:
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    names = {line for line in lines if line and not line.startswith("#")}
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    code = [span for row in rows for span in re.findall(r"`([^`]*)`", row.split("|")[1])]
    assert names <= {word for span in code for word in re.findall(r"\w+", span)}


def test_every_table_has_three_columns() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    # A cell may hold an escaped bar.
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}
