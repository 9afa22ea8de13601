"""Checks what somebody gives as an argument, before anything depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from sync_core.errors import OptionError


def check_count(value: Any, name: str, *, least: int = 1, never: str = "") -> int:
    """The number; integers of numpy are some too, True and False are none.

    Args:
        value: what was given.
        name: the argument's, for messages.
        least: the smallest that there may be.
        never: what -1 stands for; nothing where it stands for nothing.

    Raises:
        TypeError: it is no integer.
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
    """The number, of whatever sign; raise `TypeError` with the advice if it is no integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, which is no integer; {advice}")
    return int(value)


def check_function(value: Any, name: str) -> None:
    """Raise `TypeError` unless this can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r}, which cannot be called; give a function")


def check_layers(value: Any) -> None:
    """Raise `OptionError` unless this is a list of layers, and not a single one."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"layers is a list: layers=[{value!r}]")


def check_path(value: Any, name: str) -> None:
    """Raise `TypeError` unless this is a string, as paths to what a worker has are."""
    if not isinstance(value, str):
        raise TypeError(f'{name} is {value!r}, which is no string; write it like "env.reset"')


def check_mapping(value: Any, name: str, example: str) -> None:
    """Raise `TypeError` unless this maps strings to something.

    Args:
        value: what was given.
        name: the argument's, for messages.
        example: what to write instead.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r}, which is no mapping; write it like {example}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} has the key {key!r}, which is no string; write {example}")
