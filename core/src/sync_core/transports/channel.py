"""Messages over a stream socket: small JSON objects, over a unix one with file descriptors."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sync_core.transports.descriptors import no_more_descriptors

#: What the longest message takes, in bytes.
MAX_MESSAGE = 1 << 20
_MAX_DESCRIPTORS = 4
_HUNG_UP = (BrokenPipeError, ConnectionResetError)
_CLOSED = "the other side closed the connection"
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

Message = dict[str, Any]

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Channel:
    """One end of a connection.

    Messages are far smaller than a socket's buffer, and a peer asks before it is answered, so a
    write that would block means a peer that does not keep to the protocol.

    Args:
        connection: a connected stream socket; the channel owns it from now on.
        limit: the size of the longest message that is accepted, in bytes.
    """

    def __init__(self, connection: socket.socket, limit: int = MAX_MESSAGE) -> None:
        self.limit = limit
        connection.setblocking(False)
        self._socket = connection
        self._received = bytearray()
        self._messages: deque[Message] = deque()
        self._descriptors: deque[int | None] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def passes_descriptors(self) -> bool:
        """Whether both ends are on one machine, and connected by a unix socket."""
        return sys.platform != "win32" and self._socket.family == socket.AF_UNIX

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with descriptors that the other side gets duplicates of.

        Raises:
            ConnectionError: the other side is gone, or reads nothing.
        """
        text = _encode(message).encode()
        data = len(text).to_bytes(4, "little") + text
        try:
            if socket.send_fds(self._socket, [data], descriptors) != len(data):
                raise ConnectionError("the peer does not read its messages")
        except BlockingIOError as error:
            raise ConnectionError("the peer does not read its messages") from error
        except _HUNG_UP as error:
            raise ConnectionError(_CLOSED) from error
        except OSError as error:
            raise ConnectionError(f"the connection is gone: {error}") from error

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None when none came within ``timeout`` seconds.

        Raises:
            ConnectionError: the other side is gone, or sent no messages of ours.
        """
        deadline = time.monotonic() + timeout
        while not self._messages:
            left = max(0.0, deadline - time.monotonic())
            if not self._poll.poll(left * 1000):
                return None
            self.read()
        return self._messages.popleft()

    def read(self) -> None:
        """Read what has arrived, without waiting.

        Raises:
            ConnectionError: the other side is gone, or sent no messages of ours.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, 1 << 16, _MAX_DESCRIPTORS, _CLOSE_ON_EXEC
            )
        except BlockingIOError:
            return
        except _HUNG_UP as error:
            raise ConnectionError(_CLOSED) from error
        except OSError as error:
            raise ConnectionError(f"the connection is gone: {error}") from error
        self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC:
            # In its place, so that nobody takes the next one for it.
            self._descriptors.append(None)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise ConnectionError("the peer sent file descriptors that nobody asked for")
        if not data:
            raise ConnectionError(_CLOSED)
        self._received += data
        self._parse()

    def pop_message(self) -> Message | None:
        """A message that was read already, if there is one."""
        return self._messages.popleft() if self._messages else None

    def pop_descriptor(self) -> int:
        """The next descriptor that came with a message; the caller owns it.

        Raises:
            ConnectionError: a message promised one that did not come.
            CapacityError: it was lost, as this process may not open one more.
        """
        if not self._descriptors:
            raise ConnectionError("a message came without its file descriptor")
        descriptor = self._descriptors.popleft()
        if descriptor is None:
            raise no_more_descriptors()
        return descriptor

    def wake(self) -> None:
        """Let who waits for a message take the other side for gone; any thread may call this."""
        # Not to close it: a descriptor that is waited for could become somebody else's.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the connection and what came over it unused."""
        for descriptor in self._descriptors:
            if descriptor is not None:
                os.close(descriptor)
        self._descriptors.clear()
        # The last thing, as the peer sees it.
        self._socket.close()

    def _parse(self) -> None:
        while len(self._received) >= 4:
            size = int.from_bytes(self._received[:4], "little")
            if size > self.limit:
                raise ConnectionError(f"the peer announced a message of {size} bytes")
            if len(self._received) < 4 + size:
                return
            try:
                message = json.loads(bytes(self._received[4 : 4 + size]))
            except (ValueError, RecursionError) as error:
                raise ConnectionError("the peer sent no message of ours") from error
            if not isinstance(message, dict):
                raise ConnectionError("the peer sent no message of ours")
            del self._received[: 4 + size]
            self._messages.append(message)
