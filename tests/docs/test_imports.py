"""Imports that are named in strings keep to the contracts, and the picture of imports is current.

The command ``lint-imports`` reads import statements only. A package that imports late names its
modules in a table, `sync_core.lazy`, and a command names its module.
"""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatch
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
        ("sync_core.transports", "sync_core.transports.calling"),
        ("sync_plugin_std", "sync_plugin_std.restart"),
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


def test_plugins_name_only_public_modules_of_the_core(imports: ModuleType) -> None:
    (contract,) = (c for c in imports.configuration()["contracts"] if "public modules" in c["name"])
    private = [*contract["forbidden_modules"], *(f"{m}.*" for m in contract["forbidden_modules"])]
    named = [each for each in imports.lazy_imports() if not each.importer.startswith("sync_core")]
    assert not [each for each in named if any(fnmatch(each.imported, name) for name in private)]


def test_the_picture_is_current(imports: ModuleType) -> None:
    assert imports.PICTURE.read_text() == imports.picture(), "type: python docs/import_graph.py"
