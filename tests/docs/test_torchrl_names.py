"""The page for users of TorchRL has each of its names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sync_collector import Collector
from sync_core import Receiver, Sender

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


def _calls() -> Iterator[tuple[str, ast.Call]]:
    """The calls in the columns of what is here, as they stand there."""
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        if row[:1] == "|":
            for span in re.findall(r"`([^`]*\))`", "|".join(re.split(r"(?<!\\)\|", row)[2:])):
                # One value, or several of them.
                code = re.sub(r"(?<=[=:])( ?)…", r"\1_", span).replace("…", "*_")
                node = ast.parse(code).body[0]
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    yield span, node.value


@pytest.mark.parametrize("made", [Sender, Receiver, Collector])
def test_every_keyword_of_a_line_exists(made: type) -> None:
    parameters = inspect.signature(made).parameters
    # Of the scheme, whose name stands before them.
    options = {"backend", "tensor_transport"} if made is Sender else set()
    calls = [(s, c) for s, c in _calls() if ast.unparse(c.func) == made.__name__]
    assert len(calls) > 2
    for span, call in calls:
        assert {each.arg for each in call.keywords} <= {*parameters, *options}, span
