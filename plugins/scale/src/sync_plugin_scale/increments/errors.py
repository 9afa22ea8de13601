"""The failure of a worker that cannot use an increment."""

from __future__ import annotations

from sync_core import WorkerError


class IncrementError(WorkerError):
    """The worker could not use an increment: it lacks the base, or the result has other bits.

    It keeps the version it had, and is sent the whole version in the same send.
    """

    failure = "increment"
