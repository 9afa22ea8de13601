"""Run every code block of the README and of the pages, unless it gives a reason to skip it.

Blocks of a page run in its order and in one namespace. Names that a page assumes, such as a
policy, are defined in the page, in an invisible comment:

    <!--- invisible-code-block: python
    policy = torch.nn.Linear(4, 2)
    --->

A block that cannot run says why in the comment before it: <!--- skip: next "needs a GPU" -->.
A Python block whose first line is `# name.py` is a file of that name, which later blocks import.
Commands are not run: their programs, files, targets and options have to exist.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest import SkipTest

import pytest
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.typing import Parser

ROOT = Path(__file__).parents[2]
_LANGUAGES = {"python", "bash", "toml"}
# Blocks that are not run: printed output.
_NO_CODE = {"text", "{include}", "{toctree}"}
_FENCE = re.compile(r"^ *```(\S*)", re.MULTILINE)
_SKIP = re.compile(r"<!-+ *(skip.*?) *-+>", re.DOTALL)
_REASON = re.compile(r'skip: next "[^"]{10,}"')
_FILE = re.compile(r"# (\w+\.py)\n")

_READMES = (path.with_name("README.md") for path in ROOT.glob("[cp]*/**/pyproject.toml"))
_PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *_READMES, *(ROOT / "docs").rglob("*.md")]
    if "_build" not in path.relative_to(ROOT).parts and "```" in path.read_text(encoding="utf-8")
)
_each_page = pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))

_run = PythonEvaluator()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to write files in, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("folder")
@_each_page
def test_page(page: Path, check_commands: Callable[[str], None]) -> None:
    parsers: list[Parser] = [
        SkipParser(),
        CodeBlockParser("python", _run_python),
        CodeBlockParser("bash", lambda example: check_commands(example.parsed)),
        CodeBlockParser("toml", _read_toml),
    ]
    document = Document.parse(str(page), *parsers)
    document.namespace["__name__"] = "__main__"
    for example in document.examples():
        with suppress(SkipTest):
            example.evaluate()


@_each_page
def test_blocks_have_a_language_and_a_reason_not_to_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert {*_FENCE.findall(text)[::2]} <= _LANGUAGES | _NO_CODE
    assert all(_REASON.fullmatch(skip) for skip in _SKIP.findall(text))


def _run_python(example: Example) -> None:
    if name := _FILE.match(example.parsed):
        Path(name[1]).write_text(example.parsed, encoding="utf-8")
    else:
        _run(example)


def _read_toml(example: Example) -> None:
    tomllib.loads(example.parsed)
