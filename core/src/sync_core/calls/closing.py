"""The last thing that a worker does: it closes what it hosted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from sync_core.calls.outcome import CallOutcome


def close_hosted(worker_id: int, hosted: object) -> None:
    """Call ``close()`` of a hosted object whose class has one; a warning tells if that raises.

    For authors of worker groups: it is the last call that a worker runs, where all others ran.
    As with special methods, an instance's own attribute is none.

    Args:
        worker_id: the worker, which the warning names.
        hosted: what its factory made.

    Example:
        >>> class Lamp:
        ...     def close(self):
        ...         print("off")
        >>> close_hosted(0, Lamp())
        off
        >>> close_hosted(0, ["nothing to close"])
    """
    close: Callable[[Any], object] | None = getattr(type(hosted), "close", None)
    if close is None:
        return
    outcome = CallOutcome.of(close, hosted)
    if outcome.failed:
        name = f"{type(hosted).__name__}.close"
        warnings.warn(
            f"worker {worker_id}: {name} {outcome.verdict}\n{outcome.traceback}".rstrip(),
            stacklevel=2,
        )
