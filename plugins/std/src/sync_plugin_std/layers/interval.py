"""The layer ``interval``: a worker is updated by every k-th push only."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from sync_core import SkipContext, hookimpl


@dataclass(frozen=True)
class Interval:
    """Holds a push back unless it is the k-th since the worker was last updated.

    Counted for each worker separately, so that a push to some workers counts for those alone.
    The first push to a worker always goes out; after an update k - 1 pushes are held back and
    the next one goes out. With a collector that pushes after every batch, a worker is refreshed
    every k batches. A push that failed does not count as an update, so the next one goes out.

    Args:
        pushes: k; 1 holds nothing back.

    Raises:
        ValueError: k is not a positive integer.

    Example:
        >>> Interval(4)
        Interval(pushes=4)
    """

    pushes: int

    def __post_init__(self) -> None:
        # NumPy's integers are integers, too.
        integer = isinstance(self.pushes, Integral) and not isinstance(self.pushes, bool)
        if not integer or self.pushes < 1:
            raise ValueError(f"Interval counts pushes from 1, not {self.pushes!r}")

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool | None:
        """Skip until the k-th push."""
        if context.updated and context.pushes < self.pushes:
            return True
        return None
