"""Distributions that errors and pages advise to install exist, and belong to this project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sync_core import registry
from sync_core.distributions import INSTEAD

ROOT = Path(__file__).parents[2]
PROJECTS = [
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    for path in (*ROOT.glob("core/pyproject.toml"), *ROOT.glob("plugins*/**/pyproject.toml"))
]
EXTRAS = {project["name"]: {*project.get("optional-dependencies", ())} for project in PROJECTS}
# Of these, each is what one of ours is declared to need.
NEEDED = {
    canonicalize_name(Requirement(text).name)
    for project in PROJECTS
    for texts in (
        project.get("dependencies", ()),
        *project.get("optional-dependencies", {}).values(),
    )
    for text in texts
}
SOURCES = sorted(path for path in ROOT.glob("**/src/**/*.py") if "templates" not in path.parts)
PAGES = sorted(p for p in ROOT.glob("**/*.md") if not {".venv", "node_modules"} & {*p.parts})
_NAME = re.compile(r"pip install (?:-U |--upgrade )?[\"']?([A-Za-z{][^\s\"'`,;]*)")
_EXTRAS = re.compile(r"\b(sync-[a-z-]*[a-z])\[([a-z0-9,-]+)\]")
# Strings of Python that stand one below the other.
_SPLIT = re.compile(r"[\"']\s*\n\s*f?[\"']")
# What stands in advice for a name: each is one of `registry.OURS`, but for the last, which is what
# one of these needs.
COMPUTED = (
    *("{_CORE}", "{name}", "{known[name]}", "{owner}", "{known[near[0]]}", "{distribution}"),
    "{requirement.name}",
)


def test_the_list_has_each_distribution_of_the_project() -> None:
    assert EXTRAS.keys() == registry.OURS
    for known in registry.KNOWN.values():
        assert {*known.values()} <= registry.OURS
    assert {owner for _, owner in INSTEAD.values()} <= registry.OURS


def test_names_in_errors_belong_to_the_project() -> None:
    for path in SOURCES:
        text = _SPLIT.sub("", path.read_text(encoding="utf-8"))
        for name in _NAME.findall(text):
            if not name.startswith(COMPUTED):
                found = re.match("[A-Za-z0-9-]*", name)
                assert found is not None
                assert found[0] in registry.OURS | NEEDED, f"{path}: {name}"


def test_extras_exist() -> None:
    for path in (*SOURCES, *PAGES):
        for name, extras in _EXTRAS.findall(path.read_text(encoding="utf-8")):
            assert {*extras.split(",")} <= EXTRAS[name], f"{path}: {name}[{extras}]"
