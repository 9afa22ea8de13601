"""Check that this process can open the file descriptors that gloo needs.

If gloo cannot accept a connection, it ends the process on its own thread
(https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/listener.cc), so this check comes
first.
"""

from __future__ import annotations

import errno
import os

# A process group of n members takes n + 3 descriptors in each, and some more at its start.
_BESIDE = 8


def enough_descriptors(size: int) -> bool:
    """Return whether enough descriptors are free for a process group of this size.

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
    """Return the advice for an error about too few descriptors."""
    return (
        f"this process may open too few file descriptors to connect {size} processes; "
        "type: ulimit -n 4096"
    )
