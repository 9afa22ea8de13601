"""Reads the Python sources of vLLM without importing them: definitions and their arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Sources:
    """A tree of Python sources.

    Args:
        root: the directory that has the package, such as one into which a wheel was unpacked.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parse = cache(self._parse)

    def path(self, module: str) -> Path:
        """The file of a module; of a package, its ``__init__.py``."""
        path = self.root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _parse(self, module: str) -> ast.Module:
        return ast.parse(self.path(module).read_text())

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The module and the statement that define a name, which a module may only import."""
        if not self.path(module).exists():
            return None
        for node in ast.walk(self.parse(module)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name == name:
                    return module, node
            elif isinstance(node, ast.ImportFrom):
                if any((alias.asname or alias.name) == name for alias in node.names):
                    origin = next(a.name for a in node.names if (a.asname or a.name) == name)
                    return self.find(self._absolute(module, node), origin)
            elif name in targets(node):
                return module, node
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        drop = node.level - (self.path(module).name == "__init__.py")
        head = parts[: len(parts) - drop]
        return ".".join([*head, node.module] if node.module else head)

    def classes(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """A class and its bases, as far as they are defined in these sources."""
        found = self.find(module, name)
        where, definition = found or ("", None)
        if not isinstance(definition, ast.ClassDef):
            return
        yield definition
        for base in definition.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(inner, ast.Name) and inner.id != name:
                yield from self.classes(where, inner.id)

    def method(self, module: str, name: str, method: str) -> ast.FunctionDef | None:
        """A method of a class, which may be inherited."""
        for definition in self.classes(module, name):
            for node in definition.body:
                if isinstance(node, FUNCTIONS) and node.name == method:
                    return node  # type: ignore[return-value]
        return None

    def has_attribute(self, module: str, name: str, attribute: str) -> bool:
        """Return whether a class, or one of its bases, defines or assigns an attribute."""
        for definition in self.classes(module, name):
            for node in ast.walk(definition):
                if isinstance(node, FUNCTIONS) and node.name == attribute:
                    return True
                if attribute in targets(node):
                    return True
        return False


def targets(node: ast.AST) -> list[str]:
    """The names, and the attributes of self, that a statement assigns or annotates."""
    found = []
    given = node.targets if isinstance(node, ast.Assign) else []
    given = [node.target] if isinstance(node, ast.AnnAssign) else given
    for target in given:
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(each, ast.Name):
                found.append(each.id)
            elif isinstance(each, ast.Attribute):
                found.append(each.attr)
    return found


def takes(function: ast.AST, count: int, keywords: frozenset[str] = frozenset()) -> bool:
    """Return whether a function takes so many positional arguments, and these by name.

    Args:
        function: the definition of a function, a method, or a class with ``__init__``.
        count: how many are given by position, without ``self``.
        keywords: those that are given by name.
    """
    if isinstance(function, ast.ClassDef):
        made = [n for n in function.body if isinstance(n, FUNCTIONS) and n.name == "__init__"]
        return not made or takes(made[0], count, keywords)
    assert isinstance(function, FUNCTIONS)
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    needed = names[: len(names) - len(given.defaults)]
    if names[:1] in (["self"], ["cls"]):
        names, needed = names[1:], needed[1:]
    if count > len(names) and given.vararg is None:
        return False
    by_name = {*names[count:], *(each.arg for each in given.kwonlyargs)}
    if not keywords <= by_name and given.kwarg is None:
        return False
    defaults = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    needed = [*needed[count:], *(arg.arg for arg, default in defaults if default is None)]
    return keywords.issuperset(needed)
