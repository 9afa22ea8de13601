"""The imports of all distributions, those of lazy packages included, and a picture of them.

    python docs/import_graph.py

writes docs/explanation/imports.svg, which docs/explanation/architecture.md shows.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import grimp

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "explanation" / "imports.svg"
FLOORS = "The core's eight floors: imports never go up"
DISTRIBUTIONS = "Distributions import what they declare as their dependencies"
#: Imports that go up the floors, and why.
UPWARDS: Mapping[tuple[str, str], str] = {
    ("sync_core.distributions", "sync_core"): "reads __version__, which build tools read there",
}


class Import(NamedTuple):
    """An import of a module, or of a name of one.

    Args:
        importer: the module that imports.
        imported: the module that is imported.
        line: the line of the import.
        name: what is imported of it; "" for the module.
    """

    importer: str
    imported: str
    line: int
    name: str = ""


def configuration() -> dict[str, Any]:
    """Return the configuration of import-linter."""
    tools: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return dict(tools["importlinter"])


def layers(name: str) -> list[list[str]]:
    """Return the layers of a contract, from the top, as lists of modules."""
    (contract,) = (c for c in configuration()["contracts"] if c["name"] == name)
    return [layer.replace(":", "|").replace(" ", "").split("|") for layer in contract["layers"]]


def graph() -> grimp.ImportGraph:
    """Return the graph of imports, to which those named in strings are added."""
    found = _statements()
    for importer, imported, line, _ in _named_in_strings(found.modules):
        if not found.direct_import_exists(importer=importer, imported=imported):
            found.add_import(
                importer=importer, imported=imported, line_number=line, line_contents="lazy"
            )
    return found


def lazy_imports() -> set[Import]:
    """Return the imports that are named in strings."""
    return set(_named_in_strings(_statements().modules))


def imported_names() -> Iterator[Import]:
    """Return the imports in statements, each name separately, those for type checkers included."""
    for module, text in sources():
        yield from names_in(module, text)


def sources() -> Iterator[tuple[str, str]]:
    """Return the text of each module of the distributions."""
    for module, path in _files({*_statements().modules}):
        yield module, path.read_text(encoding="utf-8")


def names_in(module: str, text: str) -> Iterator[Import]:
    """Return the imports in the statements of one module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(module, each.name, node.lineno) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = (each.name for each in node.names)
            yield from (Import(module, node.module, node.lineno, name) for name in names)


def _statements() -> grimp.ImportGraph:
    """Return the graph of import statements; without grimp's cache, which outlives modules."""
    roots = configuration()["root_packages"]
    return grimp.build_graph(*roots, exclude_type_checking_imports=True, cache_dir=None)


def _named_in_strings(modules: Iterable[str]) -> Iterator[Import]:
    """Return each string that is the name of a module, or of one of the package's own."""
    known = {*modules}
    for module, path in _files(known):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                target = node.value
                if path.name == "__init__.py" and f"{module}.{target}" in known:
                    target = f"{module}.{target}"
                if "." in target and target in known and target != module:
                    yield Import(module, target, node.lineno)


def _files(modules: set[str]) -> Iterator[tuple[str, Path]]:
    sources = {path.name: path for path in ROOT.glob("[cp]*/**/src/*") if path.is_dir()}
    for module in sorted(modules):
        root, *rest = module.split(".")
        base = sources[root].joinpath(*rest)
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        yield module, path


def picture() -> str:
    """Return the picture of the tree: distributions, and the floors of the core."""
    found = graph()
    rows = layers(DISTRIBUTIONS)
    assert rows.pop() == ["sync_core"]
    drawn = _Drawing()
    for row in rows:
        drawn.row([(name, _below(found, name), _folders(found, name)) for name in sorted(row)])
        drawn.arrow()
    drawn.core([sorted(floor) for floor in layers(FLOORS)], found)
    return drawn.text()


def _below(found: grimp.ImportGraph, name: str) -> str:
    """Return the distributions that one imports, beside the core."""
    roots = {m.split(".")[0] for m in _imported_by(found, name)} - {name, "sync_core"}
    return "imports " + ", ".join(map(_short, sorted(roots))) if roots else ""


def _imported_by(found: grimp.ImportGraph, name: str) -> set[str]:
    inside = {name, *found.find_descendants(name)}
    return {m for each in inside for m in found.find_modules_directly_imported_by(each)}


def _folders(found: grimp.ImportGraph, name: str) -> str:
    return "  ·  ".join(
        f"{child.rpartition('.')[2]}/"
        for child in sorted(found.find_children(name))
        if found.find_children(child)
    )


def _short(name: str) -> str:
    return name.removeprefix("sync_plugin_").removeprefix("sync_")


class _Drawing:
    """Lines of an SVG, from the top to the bottom; lengths are in pixels."""

    _WIDTH, _GAP, _HEIGHT = 960, 12, 64

    def __init__(self) -> None:
        self._y = 8
        self._lines: list[str] = []

    def row(self, boxes: list[tuple[str, str, str]]) -> None:
        width = (self._WIDTH - self._GAP * (len(boxes) + 1)) // len(boxes)
        for place, (title, *lines) in enumerate(boxes):
            x = self._GAP + place * (width + self._GAP)
            self._box(x, self._y, width, self._HEIGHT)
            self._text(x + width // 2, self._y + 20, title, "name")
            for line, text in enumerate(lines):
                self._text(x + width // 2, self._y + 38 + 16 * line, text, "quiet")
        self._y += self._HEIGHT

    def arrow(self) -> None:
        x, y = self._WIDTH // 2, self._y
        self._lines.append(f'<path class="line" d="M{x} {y + 3} V{y + 19}" marker-end="url(#a)"/>')
        self._y += 26

    def core(self, floors: list[list[str]], found: grimp.ImportGraph) -> None:
        height = 36 + 44 * len(floors)
        self._box(self._GAP, self._y, self._WIDTH - 2 * self._GAP, height)
        self._text(self._WIDTH // 2, self._y + 21, "sync_core", "name")
        y = self._y + 32
        for floor in floors:
            x = 2 * self._GAP
            width = self._WIDTH - 4 * self._GAP
            self._box(x, y, width, 36, kind="floor")
            names = [f"{n}/" if found.find_children(f"sync_core.{n}") else n for n in floor]
            self._text(self._WIDTH // 2, y + 23, "  ·  ".join(names), "unit")
            y += 44
        self._y += height + 8

    def text(self) -> str:
        style = (
            "text{font:12px sans-serif;fill:#222;text-anchor:middle}.name{font-weight:600}"
            ".quiet{font-size:10px;fill:#555}.box{fill:#fff;stroke:#778}.floor{fill:#eef2f7}"
            ".line{stroke:#556;fill:none}#a path{fill:#556}"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._WIDTH} {self._y}">\n'
            f"<style>{style}</style>\n"
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>\n'
            f'<rect width="{self._WIDTH}" height="{self._y}" fill="#fff"/>'
        )
        return "\n".join([head, *self._lines, "</svg>\n"])

    def _box(self, x: int, y: int, width: int, height: int, kind: str = "box") -> None:
        self._lines.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
        )

    def _text(self, x: int, y: int, text: str, kind: str) -> None:
        if text:
            self._lines.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
