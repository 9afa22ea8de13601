"""A check that this process may open the descriptors that gloo needs.

gloo ends the process where it cannot accept a connection, in its own thread
(https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/listener.cc), so that is asked before.
"""

from __future__ import annotations

import errno
import os

# A wire of n ends takes n + 3 in each of them, and some more while it is made.
_BESIDE = 8


def enough_descriptors(size: int) -> bool:
    """Return whether there are enough for a wire with so many ends.

    Example:
        >>> enough_descriptors(2)
        True
    """
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(2 * size + _BESIDE))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


def advice(size: int) -> str:
    """Return what to type where there are not."""
    return (
        f"this process may open too few file descriptors to connect {size} processes; "
        "type: ulimit -n 4096"
    )
