"""Checks the numbers of things that somebody gives, before anything depends on them."""

from __future__ import annotations

from numbers import Integral
from typing import Any


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
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, which is no integer; {advice}")
    if value < least and not (never and value == -1):
        raise ValueError(f"{name} is {value}; {advice}")
    return int(value)
