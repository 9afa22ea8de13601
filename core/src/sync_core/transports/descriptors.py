"""The error of a process that may open no more file descriptors."""

from __future__ import annotations

from sync_core.errors import CapacityError


def no_more_descriptors() -> CapacityError:
    """What to raise where one more was needed for shared memory."""
    return CapacityError(
        "this process can open no more file descriptors, two of which a piece of shared memory "
        "takes; type: ulimit -n 4096"
    )
