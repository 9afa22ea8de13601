"""Ctrl-C at a chosen moment, so that tests can try one after the other."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Moments:
    """What became of an `interrupted` block."""

    #: Whether there was such a moment.
    came = False


@contextmanager
def interrupted(moment: int, *, within_threading: bool = False) -> Iterator[Moments]:
    """For ``with``: Ctrl-C, at one of the moments at which Python looks for it in code of ours.

    A moment is when a function begins, and when one that is not written in Python returns.
    Generators are left out where they go on: one that is let go of does so a last time, in a
    destructor, and what is raised there reaches nobody.

    Args:
        moment: which of them; a block may have fewer.
        within_threading: whether code of `threading` counts as ours: Conditions and Events are
            written in Python, and may keep their lock when they are interrupted.
    """
    left, moments = moment, Moments()

    def look(frame: FrameType, event: str, arg: object) -> None:
        del arg
        nonlocal left
        code = frame.f_code
        goes_on = event == "call" and code.co_flags & inspect.CO_GENERATOR
        ours = "/sync_" in code.co_filename or (
            within_threading and code.co_filename == threading.__file__
        )
        if event in ("call", "c_return") and not goes_on and ours:
            left -= 1
            if left == -1:
                moments.came = True
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    try:
        yield moments
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
