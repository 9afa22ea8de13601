"""A check that command lines in a page can be typed: programs, files and options exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from sync_tools.main import make_parser

ROOT = Path(__file__).parents[2]
_ASSIGNMENT = re.compile(r"[A-Z_]+=")
_REQUIREMENT = re.compile(r"(?P<name>sync-[a-z]+(?:-[a-z]+)?)(?:\[(?P<extras>[a-z,]+)\])?")
# Their arguments are another project's matter, but for the files among them.
_OTHERS = {"cd", "pip", "pytest", "python", "ray", "srun", "torchrun"}


@pytest.fixture(scope="session")
def check_commands() -> Callable[[str], None]:
    """Fail with the line that a reader could not type."""
    return _check_commands


def _check_commands(block: str) -> None:
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and _ASSIGNMENT.match(words[0]):
            words.pop(0)
        if words:
            _check(words[0].rpartition("/")[2], words[1:], line)


def _check(program: str, arguments: list[str], line: str) -> None:
    if program == "make":
        _check_targets(arguments, line)
    elif program == "sync-core":
        _check_sync_core(arguments, line)
    else:
        assert program in _OTHERS, f"what is {program!r}? {line}"
        if program == "pip":
            _check_requirements(arguments, line)
        for path in (a for a in arguments if a.endswith(".py") and a.startswith("docs/")):
            assert (ROOT / path).exists(), line
        if program in ("pytest", "python"):
            _check_modules(arguments, line)


def _check_targets(arguments: list[str], line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        name, assigned, _ = argument.partition("=")
        pattern = rf"^{name} [?:]?=" if assigned else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), line


def _check_sync_core(arguments: list[str], line: str) -> None:
    with suppress(SystemExit):
        _, rest = make_parser().parse_known_args(arguments)
        assert not rest or arguments[0] in {"bench", "doctor"}, line
        return
    pytest.fail(f"sync-core refuses it: {line}")


def _check_requirements(arguments: list[str], line: str) -> None:
    projects = [
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for path in (*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml"))
    ]
    extras = {p["name"]: {*p.get("optional-dependencies", ())} for p in projects}
    for argument in arguments:
        if found := _REQUIREMENT.match(argument):
            assert found["name"] in extras, line
            assert {*(found["extras"] or "").split(",")} <= {"", *extras[found["name"]]}, line


def _check_modules(arguments: list[str], line: str) -> None:
    for option, module in pairwise(arguments):
        if option in ("-m", "--pyargs"):
            assert find_spec(module) is not None, line
