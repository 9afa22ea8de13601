"""Makes the options that a user gave into what their owner declares, or says what is wrong."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import MISSING, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sync_core.errors import OptionError

Options = TypeVar("Options")

# Those of numpy are none of Python's own.
_NUMBERS: Mapping[Any, type] = {int: Integral, float: Real}


def parse_options(options_type: type[Options], given: Mapping[str, Any], owner: str) -> Options:
    """An instance of the dataclass ``options_type`` from the options given to ``owner``."""
    declared = {f.name: f for f in fields(options_type)}  # type: ignore[arg-type]
    unknown = [name for name in given if name not in declared]
    if unknown:
        known = ", ".join(sorted(declared)) or "none"
        raise OptionError(f"{owner} has no option {unknown[0]!r}; its options are: {known}")
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
    kind = get_origin(kind) or kind
    if isinstance(value, bool) and kind in _NUMBERS:
        return False
    try:
        return isinstance(value, _NUMBERS.get(kind, kind))
    except TypeError:
        return True  # Any, Literal, a protocol and the like: nothing that a value is an instance of
