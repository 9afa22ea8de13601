"""What became of one call, in a form that can travel: a value, or how it failed."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no value.

    Args:
        verdict: what the function did; a sentence without its subject: ``raised KeyError: 'a'``.
        traceback: where, as text.
        cause: the exception; its pickle, or None, while it travels between processes.
    """

    verdict: str
    traceback: str
    cause: BaseException | list[bytearray] | None

    @classmethod
    def because(cls, verdict: str, error: BaseException) -> Failed:
        """A failure with an exception, told from the frame below the one that caught it."""
        below = error.__traceback__ and error.__traceback__.tb_next
        frames = traceback.format_exception(type(error), error, below)
        summary = traceback.format_exception_only(error)[0].strip()
        return cls(f"{verdict} {summary}", "".join(frames), error)


Outcome = Returned | Failed


def attempt(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Outcome:
    """Call the function. Whatever it raises, SystemExit included, is an outcome too."""
    try:
        return Returned(function(*args, **kwargs))
    except BaseException as error:
        return Failed.because("raised", error)


def name_of(function: Callable[..., Any]) -> str:
    """What to call the function in a message."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", None) or repr(function)
