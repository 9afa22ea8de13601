"""Releasing what an object holds once it is forgotten, but only in the process that made it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def release_with(
    owner: object, release: Callable[..., Any], *args: Any
) -> weakref.finalize[Any, Any]:
    """Call ``release(*args)`` when the owner is forgotten, when the process ends, or when called.

    As `weakref.finalize`, except that a process which was forked from this one does not: it has
    the owner in its memory, but what the owner holds is not its to release, locks may be held by
    threads that it lacks, and connections are the parent's.

    Args:
        owner: who holds it; not to be kept alive by ``release`` or ``args``.
        release: what to call, at most once.
        args: its arguments.

    Example:
        >>> class Owner: ...
        >>> owner = Owner()
        >>> release = release_with(owner, print, "released")
        >>> del owner
        released
        >>> release()
    """
    return weakref.finalize(owner, _release, os.getpid(), release, args)


def _release(process: int, release: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        release(*args)
