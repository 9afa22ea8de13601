"""Options of schemes and worker groups: keywords that a dataclass of the plugin declares."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sync_core.errors import OptionError

__all__ = ["Options", "parse_options", "read_option"]

Options = TypeVar("Options")

# Numbers of numpy are not Python's.
_NUMBERS: Mapping[Any, type] = {int: Integral, float: Real}


def parse_options(options_type: type[Options], given: Mapping[str, Any], owner: str) -> Options:
    """An instance of the dataclass ``options_type`` from the options given to ``owner``."""
    declared = {f.name: f for f in fields(options_type)}  # type: ignore[arg-type]
    unknown = [name for name in given if name not in declared]
    if unknown:
        known = ", ".join(sorted(declared)) or "none"
        error = OptionError(f"{owner} has no option {unknown[0]!r}; its options are: {known}")
        error.unknown, error.known = unknown[0], tuple(sorted(declared))
        raise error
    missing = [
        name
        for name, f in declared.items()
        if f.default is MISSING and f.default_factory is MISSING and name not in given
    ]
    if missing:
        raise OptionError(f"{owner} needs the option {missing[0]!r}")
    types = _types(options_type)
    for name, value in given.items():
        if not _is_of(value, types.get(name, Any)):
            advice = "; type True or False" if _is_of(True, types[name]) else ""
            raise OptionError(f"{owner} takes {name}: {declared[name].type}, not {value!r}{advice}")
    return options_type(**given)


def read_option(text: str) -> Any:
    """The value of an option on a command line: as in Python, true and false, or else the text.

    Example:
        >>> read_option("4"), read_option("false"), read_option("gloo")
        (4, False, 'gloo')
    """
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


def _types(options_type: type) -> Mapping[str, Any]:
    try:
        return get_type_hints(options_type)
    except (NameError, AttributeError):
        # Names that its author imports for type checkers only; then nothing is checked here.
        return {}


def _is_of(value: object, kind: Any) -> bool:
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return any(_is_of(value, each) for each in get_args(kind))
    parts = get_args(kind)
    kind = get_origin(kind) or kind
    if isinstance(value, bool) and kind in _NUMBERS:
        return False
    try:
        if not isinstance(value, _NUMBERS.get(kind, kind)):
            return False
    except TypeError:
        return True  # Any, Literal, a protocol and the like: nothing that a value is an instance of
    return _are_of(value, kind, parts)


def _are_of(value: object, kind: Any, parts: Sequence[Any]) -> bool:
    """Return whether what a container holds is of the types that its own declares."""
    if isinstance(value, Mapping) and len(parts) == 2:
        return all(_is_of(k, parts[0]) and _is_of(v, parts[1]) for k, v in value.items())
    if kind is tuple and isinstance(value, tuple) and parts and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(_is_of, value, parts))
    if isinstance(value, list | tuple | set | frozenset) and parts:
        return all(_is_of(each, parts[0]) for each in value)
    return True
