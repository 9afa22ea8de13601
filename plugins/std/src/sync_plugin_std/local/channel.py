"""Messages over a stream socket: small JSON objects, with file descriptors over unix sockets."""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import struct
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from sync_core.errors import CapacityError

#: The numbers of errors for which `no_more_descriptors` is the message.
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def no_more_descriptors() -> CapacityError:
    """Return the error for a descriptor that shared memory needs and cannot get."""
    return CapacityError(
        "this process can open no more file descriptors, two of which a piece of shared memory "
        "takes; type: ulimit -n 4096"
    )


#: The size of the longest message, in bytes.
MAX_MESSAGE = 1 << 20
_MAX_DESCRIPTORS = 4
_HUNG_UP = (BrokenPipeError, ConnectionResetError)
_CLOSED = "the other side closed the connection"
_ENDED = "it has ended, and another process has its end of the connection"
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

Message = dict[str, Any]

_encode = json.JSONEncoder(separators=(",", ":")).encode


_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_when_forked(*sockets: socket.socket) -> None:
    """Have each process that is forked from this one close its copies of these sockets.

    A connection ends, and a port is free, when the last process has closed it. A process that was
    forked meanwhile, such as a DataLoader's worker, may live for longer than this one.
    """
    _ours.update(sockets)


def _close_inherited() -> None:
    for inherited in list(_ours):
        # Closing is all: shutting down a connection, or taking it out of an epoll object, would
        # reach the process that this one was forked from.
        with suppress(OSError):
            inherited.close()


os.register_at_fork(after_in_child=_close_inherited)


def open_process(pid: int | None) -> int | None:
    """Return a descriptor that is readable once another process has ended; None if none can be had.

    Raises:
        ConnectionError: there is no such process any more.
    """
    if pid is None or pid in (0, os.getpid()) or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise ConnectionError(_ENDED) from None
    except (OSError, OverflowError):
        return None  # no descriptor is left, the kernel is too old, or the pid is invalid


def closed_with(opened: ExitStack, descriptor: int) -> int:
    """Return a descriptor that a stack closes from now on."""
    opened.callback(os.close, descriptor)
    return descriptor


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
        #: A descriptor that is readable once the process on the other side has ended; see `watch`.
        self.process: int | None = None
        close_when_forked(connection)
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
        """Return whether both ends are on one machine, and connected by a unix socket."""
        return sys.platform != "win32" and self._socket.family == socket.AF_UNIX

    @property
    def on_this_machine(self) -> bool:
        """Return whether the other end seems to be on this machine: it has the same address."""
        if self.passes_descriptors:
            return True
        try:
            return bool(self._socket.getsockname()[0] == self._socket.getpeername()[0])
        except OSError:
            return False

    def peer_process(self) -> int | None:
        """Return the number of the process that has connected, or listens; None if unknown."""
        if not self.passes_descriptors:
            return None
        # Both ends of a pair were made by one process, which may have given them to others.
        is_pair = not self._socket.getsockname() and not self._socket.getpeername()
        return None if is_pair else creator_of(self._socket)

    def watch(self, process: int) -> None:
        """Take the other side for gone once a process has ended, whoever holds its end open.

        Args:
            process: a descriptor of it, from `open_process`; owned from now on.
        """
        self.process = process
        self._poll.register(process, select.POLLIN)

    def register(self, poll: select.poll) -> None:
        """Have a poll wait for messages, and for the other side's end."""
        poll.register(self, select.POLLIN)
        if self.process is not None:
            poll.register(self.process, select.POLLIN)

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
            if self._process_has_ended():
                raise ConnectionError(_ENDED) from None
            return
        except _HUNG_UP as error:
            raise ConnectionError(_CLOSED) from error
        except OSError as error:
            raise ConnectionError(f"the connection is gone: {error}") from error
        self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC:
            # In its place, so that the next one is not taken for it.
            self._descriptors.append(None)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise ConnectionError("the peer sent file descriptors that were not requested")
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
        """End the wait for a message as if the peer had closed; any thread may call this."""
        # Not to close it: a descriptor that is waited for could be reused.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the connection and what came over it unused."""
        for descriptor in self._descriptors:
            if descriptor is not None:
                os.close(descriptor)
        self._descriptors.clear()
        process, self.process = self.process, None
        if process is not None:
            os.close(process)
        # The last thing, as the peer sees it.
        self._socket.close()

    def _process_has_ended(self) -> bool:
        if self.process is None:
            return False
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(0))

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


# In seconds; the kernel needs no longer one.
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
            close_when_forked(self.socket)
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
        close_when_forked(connection)
        if sys.platform == "linux":
            # Unlike settimeout(), it waits where more than listen() allows wait already.
            limit = struct.pack("ll", *divmod(int(min(timeout, _LONGEST) * 1e6) + 1, 10**6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection


# A peer whose machine is silent for longer is gone, in seconds. Half of it is waited before the
# first question; a machine that lives answers for its processes, even for those that are stopped.
_SILENCE = 20.0
_QUESTIONS = 3


def notice_silence(connection: socket.socket) -> None:
    """Have a TCP connection end within 20 s where the other machine is gone, which says nothing.

    As it does when it has lost its power, or its network: without this, a connection that is idle
    stays open for ever, and one that is written to for a quarter of an hour.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = max(1, int(_SILENCE / 2))
    interval = max(1, int(_SILENCE / 2 / _QUESTIONS))
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", _QUESTIONS),
        ("TCP_USER_TIMEOUT", int(_SILENCE * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def same_user(connection: socket.socket, *also: int) -> bool:
    """Return whether a unix socket leads to a process of this user, or of one of those in ``also``.

    Sockets with abstract names have no permissions of their own. Of others, nothing is asked.
    """
    credentials = _credentials(connection)
    return credentials is None or credentials[1] in (os.getuid(), *also)


def creator_of(connection: socket.socket) -> int | None:
    """Return the process that made the other end of a unix socket, or both ends of a pair."""
    credentials = _credentials(connection)
    return None if credentials is None else credentials[0]


def _credentials(connection: socket.socket) -> tuple[int, int] | None:
    """Return the process and the user that a unix socket leads to."""
    if sys.platform != "linux" or connection.family != socket.AF_UNIX:
        return None
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process, user, _ = struct.unpack("3i", found)
    return process, user
