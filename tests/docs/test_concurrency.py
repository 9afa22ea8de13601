"""Compare `docs/explanation/concurrency.md` with the code: threads, locks, times, sleeps, hooks.

A name is that of a class or function and of what it makes (`Publisher.changed`,
`_copy_pieces.helper`), so that it stays the same where code moves to another module. Objects made
at the top of a module are named after any class or function that uses it (`Exclusive._PATIENCE`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "concurrency.md"

_LOCKS = ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier")
#: The headings of the page, and what a row under each is about.
MADE_BY = {
    "Threads": {
        "threading.Thread",
        "threading.Timer",
        "asyncio.to_thread",
        "concurrent.futures.ThreadPoolExecutor",
        "multiprocessing.pool.ThreadPool",
    },
    "Locks, conditions and events": {f"{m}.{n}" for m in ("threading", "asyncio") for n in _LOCKS},
    "Sleeps and polling": {"time.sleep", "asyncio.sleep"},
    "Signals, fork and exit": {
        "atexit.register",
        "multiprocessing.util.Finalize",
        "os.register_at_fork",
        "signal.signal",
        "sync_core._util.release_with",
        "sync_core.transports.release_with",
        "weakref.finalize",
    },
}
CONSTANTS = "Time constants"
#: Module-level floats that are not times.
NOT_TIMES = {"_ALIKE", "_BUSY", "_NEARLY_ALL", "_NEARLY_FULL", "_STAGING"}


@dataclass(frozen=True)
class Site:
    """A place in the code that a row of the page has to name, by any of its names."""

    names: frozenset[str]
    where: str
    value: float | None = None

    def __str__(self) -> str:
        return f"{' or '.join(sorted(self.names))} ({self.where})"


class Module:
    """One source file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self._imports = dict(_imports(self.tree))
        self._parents = {c: p for p in ast.walk(self.tree) for c in ast.iter_child_nodes(p)}
        self._annotations = {
            node
            for parent in ast.walk(self.tree)
            for field in ("annotation", "returns")
            if isinstance(annotation := getattr(parent, field, None), ast.AST)
            for node in ast.walk(annotation)
        }

    def definitions(self) -> Iterator[str]:
        """Return the names of functions, classes and methods."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield f"{node.name}.{inner.name}"

    def attributes(self) -> Iterator[str]:
        """Return the attributes that methods set, with the names of their classes."""
        for owner in self.tree.body:
            if isinstance(owner, ast.ClassDef):
                for node in ast.walk(owner):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        yield f"{owner.name}.{node.attr}"

    def users(self, name: str) -> set[str]:
        """Return the classes and functions that use a name of this module, or of its origin."""
        return {
            node.name
            for node in self.tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))
        }

    def imports(self, name: str) -> bool:
        """Return whether a name comes from another module."""
        return self._imports.get(name, "").startswith("sync_")

    def constants(self) -> Iterator[tuple[str, str, float, int]]:
        """Numbers with a name: that of their class, if any, their own, the number, the line."""
        bodies = [("", self.tree.body)]
        bodies += [(n.name, n.body) for n in self.tree.body if isinstance(n, ast.ClassDef)]
        for owner, body in bodies:
            for node in body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    targets = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    for target, value in _pairs(targets, node.value):
                        if isinstance(target, ast.Name) and (number := _number(value)) is not None:
                            yield owner, target.id, number, node.lineno

    def references(self, wanted: Iterable[str]) -> Iterator[ast.expr]:
        """Return the expressions that refer to one of these imported names, without annotations."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute | ast.Name) and self._dotted(node) in wanted:
                yield from () if node in self._annotations else (node,)

    def place_of(self, node: ast.AST) -> tuple[str, str]:
        """Return the class or function that something is made in, and its name.

        At the top of a module, the first is empty.
        """
        scopes: list[str] = []
        target, hook, statement = "", "", False
        while (parent := self._parents.get(node)) is not None:
            if not statement and isinstance(parent, ast.Assign | ast.AnnAssign):
                target = _target(parent, node)
            statement = statement or isinstance(parent, ast.stmt)
            if isinstance(parent, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                scopes.insert(0, parent.name)
            if isinstance(parent, ast.Call) and parent.func is node:
                # The function that a hook at the top of a module calls.
                given = [*parent.args, *(keyword.value for keyword in parent.keywords)]
                hook = ast.unparse(given[-1]) if given else ""
            node = parent
        if not scopes:
            return "", target or hook
        if target.startswith("self."):
            return scopes[0], target.removeprefix("self.")
        is_class = isinstance(_definition(self.tree, scopes[0]), ast.ClassDef)
        return ".".join(scopes[: 2 if is_class else 1]), target

    def _dotted(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        return self._imports.get(node.id, "") if isinstance(node, ast.Name) else ""


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _definition(tree: ast.Module, name: str) -> ast.AST:
    return next(node for node in tree.body if getattr(node, "name", None) == name)


def _target(statement: ast.Assign | ast.AnnAssign, made: ast.AST) -> str:
    """Return the name that the new object is assigned to; empty for a foreign attribute."""
    targets = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    assert statement.value is not None
    for target, value in _pairs(targets, statement.value):
        if any(node is made for node in ast.walk(value)) or value is statement.value:
            name = ast.unparse(target)
            return name if name.isidentifier() or name.startswith("self.") else ""
    return ""


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value


def _number(node: ast.expr) -> float | int | None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        assert isinstance(node.value, int | float)
        return node.value
    return None


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    # One folder deep, or two: the distributions may be grouped.
    paths = [*ROOT.glob("*/src/**/*.py"), *ROOT.glob("*/*/src/**/*.py")]
    assert paths
    return [Module(path) for path in sorted(paths)]


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the rows of the page's tables by heading, and by each name in the first cell."""
    found: dict[str, dict[str, list[str]]] = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
            found[heading] = {}
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            found[heading] |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells)
    return found


@pytest.mark.parametrize("heading", MADE_BY)
def test_the_page_names_what_is_made(
    heading: str, modules: list[Module], rows: Mapping[str, Mapping[str, list[str]]]
) -> None:
    sites = [site for module in modules for site in _sites(module, MADE_BY[heading])]
    exist = {name for site in sites for name in site.names}
    if heading == "Sleeps and polling":
        # What polls by a wait with a short timeout is named too.
        exist |= {name for module in modules for name in module.definitions()}
    _compare(heading, sites, exist, rows[heading])


def test_the_page_names_every_time_constant(
    modules: list[Module], rows: Mapping[str, Mapping[str, list[str]]]
) -> None:
    known = list(_constants(modules))
    exist = {name for site in known for name in site.names}
    required = [
        site
        for site in known
        if isinstance(site.value, float) and not {*_last_parts(site.names)} & NOT_TIMES
        if not any(name.split(".")[-1].islower() for name in site.names)
    ]
    _compare(CONSTANTS, required, exist, rows[CONSTANTS])
    for name, cells in rows[CONSTANTS].items():
        values = {site.value for site in known if name in site.names}
        told = re.match(r"[\d.e-]+", cells[1].replace(" ", ""))
        assert told, f"no value of {name}"
        assert float(told[0]) in values, f"{name} is {values}, not {cells[1]}"


def test_the_text_names_only_what_exists(modules: list[Module]) -> None:
    exist = {name for site in _constants(modules) for name in site.names}
    for module in modules:
        exist |= {*module.definitions(), *module.attributes()}
        exist |= {
            name for made in MADE_BY.values() for s in _sites(module, made) for name in s.names
        }
    # `Class.member`, and no name of Python's or of another library's.
    named = re.findall(r"`(_?[A-Z]\w*\.[\w.]+)`", PAGE.read_text(encoding="utf-8"))
    assert not {*named} - exist


def _sites(module: Module, wanted: set[str]) -> Iterator[Site]:
    for node in module.references(wanted):
        owner, name = module.place_of(node)
        where = f"{module.path.relative_to(ROOT)}:{node.lineno}"
        if owner:
            yield Site(frozenset({f"{owner}.{name}" if name else owner}), where)
        else:
            users = {f"{user}.{name}" for user in module.users(name)}
            yield Site(frozenset(users or {name}), where)


def _constants(modules: list[Module]) -> Iterator[Site]:
    for module in modules:
        for owner, name, number, line in module.constants():
            where = f"{module.path.relative_to(ROOT)}:{line}"
            users = {owner} if owner else module.users(name)
            if not owner and not name.startswith("_"):
                users |= {u for other in modules if other.imports(name) for u in other.users(name)}
            yield Site(frozenset({f"{u}.{name}" for u in users} or {name}), where, number)


def _last_parts(names: Iterable[str]) -> Iterator[str]:
    return (name.split(".")[-1] for name in names)


def _compare(
    heading: str, required: Iterable[Site], exist: set[str], named: Mapping[str, object]
) -> None:
    """Fail with every missing row, and every row without a counterpart in the code."""
    # Of several places with the same names, one is enough.
    missing = {site.names: site for site in required if not site.names & named.keys()}.values()
    unnamed = [name for site in missing for name in sorted(site.names)]
    problems = [f"no row for {site}" for site in missing]
    for name in sorted(named.keys() - exist):
        # The same attribute in another class, or something spelt alike.
        alike = [each for each in unnamed if each.split(".")[-1] == name.split(".")[-1]]
        alike = alike or get_close_matches(name, unnamed)
        problems.append(f"no {name!r} in the code" + (f"; is it {alike} now?" if alike else ""))
    text = "\n".join(problems)
    assert not problems, f"{PAGE.relative_to(ROOT)}, {heading!r}:\n{text}"
