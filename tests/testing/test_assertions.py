"""Each assertion of the conformance suite says what a plugin must do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTING = Path(__file__).parents[2] / "plugins" / "testing" / "src" / "sync_testing"
# What workers do for the cases; they have none.
_HELPERS = {"pool.py", "worker.py"}
FILES = [
    TESTING / "layers.py",
    TESTING / "worker_groups.py",
    *sorted(p for p in (TESTING / "schemes").glob("*.py") if p.name not in _HELPERS),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_assertion_carries_a_sentence(path: Path) -> None:
    bare = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and node.msg is None and not _narrows_a_type(node.test)
    ]
    assert not bare, "\n".join(bare)


def _narrows_a_type(test: ast.expr) -> bool:
    """Return whether it is ``x is None`` or ``x is not None``, for the type checker."""
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Is | ast.IsNot)
        and isinstance(test.left, ast.Name | ast.Attribute)
    )
