"""The reference is complete: every public object is described and on a page."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sync_core
from sync_core import WorkerGroup, errors, registry
from sync_core import hooks as hookspecs
from sync_core.hooks import HOOKS, LAYER_CAPABILITIES, SCHEME_CAPABILITIES, WORKER_CAPABILITIES

ROOT = Path(__file__).parents[2]
_ASKED = re.compile(r'"(\w+)"\s+(?:not\s+)?in\s+[\w.]*capabilities')
_CAN = re.compile(r'\.can\(\s*"(\w+)"')


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("r", ROOT / "docs" / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(reference: ModuleType) -> dict[str, str]:
    written: dict[str, str] = reference.pages()
    return written


def test_every_public_name_has_one_place(reference: ModuleType, pages: dict[str, str]) -> None:
    text = "\n".join(pages.values())
    for module in reference.PUBLIC:
        for name in sys.modules[module].__all__:
            if module == "sync_core" and name in errors.__all__:
                continue  # described where it is defined
            described = rf"^\.\. \w+:: {re.escape(module)}\.{name}$"
            assert len(re.findall(described, text, re.MULTILINE)) == 1, f"{module}.{name}"


def test_every_public_name_is_described(reference: ModuleType) -> None:
    for module in reference.PUBLIC:
        for name in sys.modules[module].__all__:
            found = getattr(sys.modules[module], name)
            if inspect.isclass(found) or inspect.isfunction(found):
                assert found.__doc__, f"{module}.{name}"
            elif isinstance(found, tuple | Mapping):
                assert reference.comment_of(module, name), f"{module}.{name}"


def test_what_is_promised_is_on_a_page(reference: ModuleType) -> None:
    promises = (ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    promised = promises.partition("- What ")[2].partition(" export")[0]
    assert set(re.findall(r"`([\w.]+)`", promised)) == {*reference.PUBLIC}


def test_every_error_is_public() -> None:
    defined = {
        name
        for name, found in vars(errors).items()
        if inspect.isclass(found) and issubclass(found, errors.SyncError)
    }
    assert defined == {*errors.__all__}


def test_every_hook_says_what_it_is_given(reference: ModuleType, pages: dict[str, str]) -> None:
    for hook in HOOKS:
        function = getattr(hookspecs, hook)
        assert {*inspect.signature(function).parameters} == {*reference.arguments_of(function)}
        assert f"sync_core.hooks.{hook}" in pages["hooks"]


def test_every_field_of_a_context_is_described(reference: ModuleType) -> None:
    for name in ("TransportContext", "SendContext", "ApplyContext", "SkipContext"):
        context: Any = getattr(sync_core, name)
        assert {f.name for f in dataclasses.fields(context)} == {*reference.arguments_of(context)}


@pytest.mark.parametrize("name", registry.KNOWN[registry.SCHEMES])
def test_every_option_of_a_scheme_is_described(name: str, reference: ModuleType) -> None:
    scheme = reference.installed(registry.SCHEMES)[name]
    options = reference.options_of(scheme)
    assert {f.name for f in dataclasses.fields(options)} == {*reference.arguments_of(options)}


@pytest.mark.parametrize("name", registry.KNOWN[registry.WORKERS])
def test_every_option_of_a_worker_group_is_described(name: str, reference: ModuleType) -> None:
    group = registry.find(registry.WORKERS, name).object
    told = reference.arguments_of(group) or reference.arguments_of(WorkerGroup)
    assert {*inspect.signature(group).parameters} <= {*told}


@pytest.mark.parametrize("group", [registry.SCHEMES, registry.LAYERS, registry.WORKERS])
def test_every_plugin_is_on_the_page(group: str, pages: dict[str, str]) -> None:
    for name in registry.KNOWN[group]:
        page = pages["layers" if group == registry.LAYERS else "plugins"]
        assert re.search(rf"^{name}\n~+$", page, re.MULTILINE), name


def test_every_capability_is_explained(reference: ModuleType) -> None:
    for name, scheme in reference.installed(registry.SCHEMES).items():
        assert scheme.capabilities <= SCHEME_CAPABILITIES.keys(), name
    for name in registry.KNOWN[registry.LAYERS]:
        layer = registry.load(registry.LAYERS, registry.entry_point(registry.LAYERS, name))
        declared: frozenset[str] = getattr(layer, "capabilities", frozenset())
        assert declared <= LAYER_CAPABILITIES.keys(), name
    for name in registry.KNOWN[registry.WORKERS]:
        declared = registry.find(registry.WORKERS, name).capabilities
        assert declared <= WORKER_CAPABILITIES.keys(), name


def test_nothing_is_asked_for_that_is_no_capability() -> None:
    known = SCHEME_CAPABILITIES.keys() | WORKER_CAPABILITIES.keys()
    asked = set()
    for path in (ROOT / "core" / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        asked |= {*_ASKED.findall(text), *_CAN.findall(text)}
    assert asked
    assert asked <= known


def test_everything_that_a_command_prints_as_json_is_described(reference: ModuleType) -> None:
    for printed in reference.PRINTED.values():
        for described in printed.values():
            fields = {field.name for field in dataclasses.fields(described)}
            assert fields == {*reference.arguments_of(described)}


def test_every_option_of_a_command_is_described(reference: ModuleType) -> None:
    for command, parser in reference.subcommands().items():
        assert parser.description, command
        for action in _arguments(parser):
            assert action.help, f"{command} {action.option_strings or action.dest}"


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.help != argparse.SUPPRESS)
