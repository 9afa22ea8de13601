"""Checks the seconds that somebody gives as a deadline, before anything depends on them."""

from __future__ import annotations

from math import isnan
from numbers import Real

from sync_core.errors import OptionError

# As a number of milliseconds, more does not fit into what the calls of an operating system take.
_LONGEST = 2_000_000.0


def check_seconds(seconds: float, name: str = "timeout") -> float:
    """The deadline, at most 23 days: what is longer, as `math.inf` is, counts as that.

    Raises:
        OptionError: it is no number of seconds, or less than none.

    Example:
        >>> check_seconds(2.5), check_seconds(float("inf"))
        (2.5, 2000000.0)
    """
    valid = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not valid or isnan(seconds) or seconds < 0:
        raise OptionError(f"{name} is a number of seconds, not {seconds!r}")
    return min(float(seconds), _LONGEST)
