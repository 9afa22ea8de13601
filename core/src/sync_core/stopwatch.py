"""Adds up what something that is done in several steps takes."""

from __future__ import annotations

import time
from types import TracebackType


class Stopwatch:
    """Runs in ``with`` blocks, of one thread at a time.

    Example:
        >>> stopwatch = Stopwatch()
        >>> for _ in range(2):
        ...     with stopwatch:
        ...         time.sleep(0.01)
        >>> stopwatch.seconds > 0.02
        True
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._since
