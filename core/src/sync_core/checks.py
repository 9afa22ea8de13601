"""Checks of arguments; each error says what to type."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from sync_core.errors import OptionError, UnknownWorkerError

__all__ = [
    "check_count",
    "check_function",
    "check_integer",
    "check_layers",
    "check_mapping",
    "check_path",
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


def check_path(value: Any, name: str) -> None:
    """Raise `TypeError` unless this is a string, as paths to what a worker has are."""
    if not isinstance(value, str):
        raise TypeError(f'{name} is {value!r}, which is not a string; write it like "env.reset"')


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
