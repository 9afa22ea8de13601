"""The last thing that a worker does: it closes what it hosted."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any


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
    try:
        close(hosted)
    except (Exception, SystemExit) as error:
        summary = traceback.format_exception_only(error)[0].strip()
        # What was on its way when the worker was ended is no part of this.
        frames = traceback.format_exception(error, chain=error.__cause__ is not None)
        warnings.warn(
            f"worker {worker_id}: {type(hosted).__name__}.close raised {summary}\n"
            + "".join(frames).rstrip(),
            stacklevel=2,
        )
