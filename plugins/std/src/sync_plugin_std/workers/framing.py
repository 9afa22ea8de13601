"""Numbered messages of several parts over a stream socket, however long."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

Part = bytes | bytearray | memoryview

# The number, the length of the first part, and how many more there are; before each of those, its
# length.
_HEAD = struct.Struct("!QQQ")
_LENGTH = struct.Struct("!Q")
# Below this, joining head and part costs less than a second system call.
_SHORT = 1 << 16


def encode(number: int, parts: Sequence[Part]) -> list[Part]:
    """Return the pieces to send, in order: one for a short message of one part."""
    first, *more = parts
    head = _HEAD.pack(number, len(first), len(more))
    pieces: list[Part] = [head + first] if len(first) < _SHORT else [head, first]
    for part in more:
        pieces += [_LENGTH.pack(len(part)), part]
    return pieces


def send_message(sock: socket.socket, number: int, parts: Sequence[Part]) -> None:
    """Send one message; blocks until the other end has taken in nearly all of it.

    Raises:
        OSError: the other end is gone.
    """
    for piece in encode(number, parts):
        sock.sendall(piece)


def receive_message(sock: socket.socket) -> tuple[int, list[bytearray]] | None:
    """The next message, or None when the other end is gone, be it in the middle of one."""
    try:
        number, length, more = _HEAD.unpack(_receive(sock, _HEAD.size))
        first = _receive(sock, length)
        return number, [first, *(_receive(sock, _receive_length(sock)) for _ in range(more))]
    except (ConnectionError, EOFError):
        return None


def _receive_length(sock: socket.socket) -> int:
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    return int(length)


def _receive(sock: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    missing = memoryview(content)
    while missing:
        count = sock.recv_into(missing)
        if not count:
            raise EOFError
        missing = missing[count:]
    return content
