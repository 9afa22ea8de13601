"""Unix sockets that processes of this machine find by a name that nobody can guess."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import tempfile
from pathlib import Path

# In seconds; no kernel need be told of a longer one.
_LONGEST = 1e6


class LocalListener:
    """A listening unix socket.

    Example:
        >>> listener = LocalListener()
        >>> connection = connect_locally(listener.name, timeout=10)
        >>> same_user(connection)
        True
        >>> connection.close()
        >>> listener.close()
    """

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        name = f"sync-core-{secrets.token_hex(16)}"
        if sys.platform == "linux":
            # Abstract: it is in no directory to be left behind.
            self.name = f"\0{name}"
        else:
            self._folder = tempfile.TemporaryDirectory()
            self.name = str(Path(self._folder.name) / "socket")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(self.name)
            self.socket.listen(128)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket, and remove it where it is a file."""
        self.socket.close()
        if self._folder is not None:
            self._folder.cleanup()


def connect_locally(name: str, timeout: float) -> socket.socket:
    """A connection to a `LocalListener`.

    Args:
        name: the listener's.
        timeout: how long one that is busy, or stopped, may keep others waiting, in seconds.

    Raises:
        OSError: there is none of that name in this network namespace, or it did not answer.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if sys.platform == "linux":
            # Unlike settimeout(), it waits where more than listen() allows wait already.
            limit = struct.pack("ll", *divmod(int(min(timeout, _LONGEST) * 1e6) + 1, 10**6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection


def same_user(connection: socket.socket, *also: int) -> bool:
    """Whether a unix socket leads to a process of this user, or of one of those in ``also``.

    Sockets with abstract names have no permissions of their own. Of others, nothing is asked.
    """
    if sys.platform != "linux" or connection.family != socket.AF_UNIX:
        return True
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return user in (os.getuid(), *also)
