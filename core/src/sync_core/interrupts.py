"""Lets Ctrl-C wait for the end of what is done as a whole or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """For ``with``: Ctrl-C comes at the end of the block, which must be short.

    Python looks for it between almost any two calls of the main thread. Where the other side is
    told of something in one of them and it is noted in the next, both would be at odds for good.

    Example:
        >>> done = []
        >>> try:
        ...     with uninterrupted():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done.append("all of it")
        ... except KeyboardInterrupt:
        ...     done.append("and then Ctrl-C")
        >>> done
        ['all of it', 'and then Ctrl-C']
    """
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread is interrupted, and only where Python itself handles the signal.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
