"""Checks of arguments and of plugins' options; each error says what to type."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sync_core.errors import OptionError, UnknownWorkerError

__all__ = [
    "check_count",
    "check_function",
    "check_integer",
    "check_layers",
    "check_mapping",
    "check_seconds",
    "normalize",
    "normalize_one",
]


def check_count(value: Any, name: str, *, least: int = 1, never: str = "") -> int:
    """The number; integers of numpy are accepted too, True and False are not.

    Args:
        value: what was given.
        name: the argument's, for messages.
        least: the smallest that there may be.
        never: what -1 stands for; nothing where it stands for nothing.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is too small.

    Example:
        >>> check_count(4, "num_workers"), check_count(-1, "total_frames", never="no end")
        (4, -1)
    """
    advice = f"give {least} or more" + (f", or -1 for {never}" if never else "")
    count = check_integer(value, name, advice)
    if count < least and not (never and count == -1):
        raise ValueError(f"{name} is {count}; {advice}")
    return count


def check_integer(value: Any, name: str, advice: str) -> int:
    """The number, of whatever sign; raise `TypeError` with the advice if it is not an integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, which is not an integer; {advice}")
    return int(value)


def check_function(value: Any, name: str) -> None:
    """Raise `TypeError` unless this can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r}, which cannot be called; give a function")


def check_layers(value: Any) -> None:
    """Raise `OptionError` unless this is a list of layers, and not a single one."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"layers is a list: layers=[{value!r}]")


def check_mapping(value: Any, name: str, example: str) -> None:
    """Raise `TypeError` unless this maps strings to something.

    Args:
        value: what was given.
        name: the argument's, for messages.
        example: what to write instead.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r}, which is not a mapping; write it like {example}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} has the key {key!r}, which is not a string; write {example}")


# As a number of milliseconds, more does not fit into what the calls of an operating system take.
_LONGEST = 2_000_000.0


def check_seconds(seconds: float, name: str = "timeout") -> float:
    """The deadline, at most 23 days: what is longer, as `math.inf` is, counts as that.

    Raises:
        OptionError: it is not a number of seconds, or less than none.

    Example:
        >>> check_seconds(2.5), check_seconds(float("inf")), check_seconds(10**400)
        (2.5, 2000000.0, 2000000.0)
    """
    valid = type(seconds) in (int, float) or (
        isinstance(seconds, Real) and not isinstance(seconds, bool)
    )
    # Not true of NaN; and an integer may be too large for a float.
    if not valid or not seconds >= 0:
        raise OptionError(f"{name} is a number of seconds, not {seconds!r}")
    return float(min(seconds, _LONGEST))


def normalize(worker_ids: int | Iterable[int] | None, known: Iterable[int]) -> tuple[int, ...]:
    """The worker ids meant, each once, in the order given.

    Args:
        worker_ids: one id, several, or None for all. Anything with ``__index__`` is an id (numpy
            integers are), except True and False. No ids mean no workers.
        known: the ids there are.

    Raises:
        UnknownWorkerError: an unknown id; ids are not negative.

    Example:
        >>> normalize([2, 0, 2], known=range(4))
        (2, 0)
    """
    everybody = tuple(known)
    if worker_ids is None:
        return everybody
    given = worker_ids if isinstance(worker_ids, Iterable) else (worker_ids,)
    return tuple(dict.fromkeys(_normalize_one(worker_id, everybody) for worker_id in given))


def normalize_one(worker_id: int, known: Iterable[int]) -> int:
    """The one worker meant.

    Raises:
        UnknownWorkerError: there is no such worker.
    """
    return _normalize_one(worker_id, tuple(known))


def _normalize_one(worker_id: Any, known: tuple[int, ...]) -> int:
    message = f"there is no worker {worker_id!r}; the workers are {list(known)}"
    if isinstance(worker_id, bool):
        raise UnknownWorkerError(message)
    try:
        index = operator.index(worker_id)
    except TypeError as error:
        raise UnknownWorkerError(message) from error
    if index not in known:
        raise UnknownWorkerError(message)
    return index


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
