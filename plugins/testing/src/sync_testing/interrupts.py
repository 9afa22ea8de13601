"""Raises Ctrl-C at a chosen moment, so that tests can try every moment."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Moments:
    """The result of an `interrupted` block."""

    #: Whether the chosen moment came.
    came = False
    #: The number of moments.
    count = 0


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        # The garbage collector calls finalizers, including those of subclasses, at any moment.
        if frame.f_code.co_name == "__call__" and isinstance(
            frame.f_locals.get("self"), weakref.finalize
        ):
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupted(moment: int | None, *, within_threading: bool = False) -> Iterator[Moments]:
    """For ``with``: raise Ctrl-C at one of the moments at which Python checks for it in our code.

    A moment is the start of a function, or the return of a function that is not written in Python.
    Generators and finalizers are left out: they may run in a destructor, where Python discards
    exceptions.

    Args:
        moment: the number of the moment; a block may have fewer. None only counts the moments.
        within_threading: whether code of `threading` counts as ours: an interrupted Condition or
            Event, which are written in Python, may keep its lock.
    """
    moments = Moments()

    def look(frame: FrameType, event: str, arg: object) -> None:
        del arg
        code = frame.f_code
        goes_on = event == "call" and code.co_flags & inspect.CO_GENERATOR
        ours = "/sync_" in code.co_filename or (
            within_threading and code.co_filename == threading.__file__
        )
        if event in ("call", "c_return") and not goes_on and ours:
            moments.count += 1
            reached = moment is not None and moments.count > moment
            if reached and not moments.came and not _in_finalizer(frame):
                moments.came = True
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    try:
        yield moments
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
