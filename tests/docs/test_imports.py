"""Imports keep to the contracts that import-linter cannot check; the picture of them is current.

The command ``lint-imports`` reads import statements only, and knows modules only. A package that
imports late names its modules in a table, `sync_core.lazy`, a command names its module, and what is
public of a distribution are names.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def imports() -> ModuleType:
    spec = importlib.util.spec_from_file_location("i", ROOT / "docs" / "import_graph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph(imports: ModuleType) -> grimp.ImportGraph:
    found: grimp.ImportGraph = imports.graph()
    return found


def _upwards(graph: grimp.ImportGraph, layers: list[list[str]], **options: Any) -> list[str]:
    floors = [grimp.Layer(*floor, independent=False) for floor in layers]
    illegal = graph.find_illegal_dependencies_for_layers(floors, **options)
    return [f"{each.importer} -> {each.imported}: {sorted(each.routes)}" for each in illegal]


def test_lazy_tables_are_read(imports: ModuleType) -> None:
    found = {(each.importer, each.imported) for each in imports.lazy_imports()}
    assert {
        ("sync_core", "sync_core.sending.sender"),
        ("sync_plugin_std.calls", "sync_plugin_std.calls.calling"),
        ("sync_plugin_std", "sync_plugin_std.workers.restart"),
        ("sync_tools", "sync_tools.status"),
    } <= found


def test_the_core_imports_no_floor_above(imports: ModuleType, graph: grimp.ImportGraph) -> None:
    for importer, imported in imports.UPWARDS:
        gone = f"{importer} -> {imported} is gone; take it out of UPWARDS in docs/import_graph.py"
        assert graph.direct_import_exists(importer=importer, imported=imported), gone
        graph.remove_import(importer=importer, imported=imported)
    assert not _upwards(graph, imports.layers(imports.FLOORS), containers={"sync_core"})


def test_distributions_name_only_their_dependencies(
    imports: ModuleType, graph: grimp.ImportGraph
) -> None:
    assert not _upwards(graph, imports.layers(imports.DISTRIBUTIONS))


def _private(imports: ModuleType, found: Iterable[Any]) -> list[str]:
    """Return the imports of what a distribution does not export, from outside of it."""
    promises = (ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    public = {*re.findall(r"`(sync_[\w.]+)`", promises.partition("- The four")[0])}
    roots = {*imports.configuration()["root_packages"]}
    foreign = [
        each
        for each in found
        if (root := each.imported.split(".")[0]) in roots and root != each.importer.split(".")[0]
    ]
    return [
        f"{each.importer}, line {each.line}: {each.imported} {each.name}"
        for each in foreign
        if each.imported not in public
        or (
            each.name
            and each.name not in import_module(each.imported).__all__
            and f"{each.imported}.{each.name}" not in public
        )
    ]


def test_distributions_import_only_public_names_of_each_other(imports: ModuleType) -> None:
    """So that a third party's plugin can do whatever ours can."""
    found = [*imports.imported_names(), *imports.lazy_imports()]
    assert len(found) > 5000, "imports are read"
    private = _private(imports, found)
    assert not private, "import what another distribution exports, or export what is needed"


def test_what_strangers_are_shown_imports_only_public_names(imports: ModuleType) -> None:
    examples = (ROOT / "docs" / "examples").glob("*.py")
    templates = (ROOT / "plugins/tools/src/sync_tools/templates").glob("*/[mt]*.txt")
    for path in (*examples, *templates):
        text = path.read_text(encoding="utf-8").replace("$", "")
        assert not _private(imports, imports.names_in(path.name, text)), path


def test_no_two_classes_of_the_distributions_share_a_name(imports: ModuleType) -> None:
    """One name, one thing: it is the same in a message, a page and the code."""
    places = defaultdict(list)
    for module, text in imports.sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert len(places) > 500, "classes are read"
    shared = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not shared, "rename the less public one to what it is"


def test_the_picture_is_current(imports: ModuleType) -> None:
    assert imports.PICTURE.read_text() == imports.picture(), "type: python docs/import_graph.py"
