"""A receiver's control connection to its sender."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable

from sync_core import SenderLostError, TransportContext
from sync_plugin_std.local import (
    Channel,
    Message,
    connect_locally,
    notice_silence,
    same_user,
)


def connect(context: TransportContext) -> socket.socket:
    """Connect to the sender, over its unix socket if this host has that and this user owns it.

    Raises:
        SenderLostError: the sender does not answer.
    """
    return _connect_locally(context) or _connect_over_tcp(context)


def _connect_locally(context: TransportContext) -> socket.socket | None:
    if not context.endpoint.local:
        return None
    try:
        connection = connect_locally(context.endpoint.local, context.timeout)
    except OSError:
        return None  # the sender is on another machine, or in another network namespace
    if same_user(connection):
        return connection
    connection.close()
    return None


def _connect_over_tcp(context: TransportContext) -> socket.socket:
    endpoint = context.endpoint
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), context.timeout)
    except OSError as error:
        raise SenderLostError(
            f"no sender answers at {endpoint.host}, port {endpoint.port}: the sender has closed or "
            "died, or its host cannot be reached from here; for other hosts, type "
            'Sender("dist", …, host=<an address of the trainer that they reach>)'
        ) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_silence(connection)
    return connection


_BEGINS_AGAIN = ("again", "gone")


class ControlChannel:
    """Sends and receives messages; also the `Control` of a process group.

    Args:
        connection: a connected socket, which this object closes.
        put_key: called with each message that has a rendezvous key; such messages skip the queue.
    """

    def __init__(self, connection: socket.socket, put_key: Callable[[Message], None]) -> None:
        self.channel = Channel(connection)
        self._put_key = put_key
        self._messages: deque[Message] = deque()

    def register(self, poll: select.poll) -> None:
        """Make a poll object wait for messages and for the end of the sender."""
        self.channel.register(poll)

    def interrupts(self) -> bool:
        """Return whether the sender has given up the transfer or is gone."""
        try:
            self.channel.read()
        except ConnectionError:
            return True
        while (message := self.channel.pop_message()) is not None:
            self._sort(message)
        return self.begins_again()

    def begins_again(self) -> bool:
        """Return whether an ``again`` message was read."""
        return any(message.get("type") in _BEGINS_AGAIN for message in self._messages)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            SenderLostError: the sender is gone.
        """
        try:
            self.channel.send(message)
        except ConnectionError as error:
            raise SenderLostError(f"the sender is gone: {error}") from error

    def hear(self, timeout: float) -> Message | None:
        """Return the next message, or None if none comes in time.

        Raises:
            SenderLostError: the sender is gone or has announced its end.
        """
        deadline = time.monotonic() + timeout
        while not self._messages:
            if not self.read_one(max(0.0, deadline - time.monotonic())):
                return None
        message = self._messages.popleft()
        if message.get("type") == "gone":
            raise SenderLostError(str(message["reason"]))
        return message

    def read_one(self, timeout: float) -> bool:
        """Read and sort in one message; return whether one came in time.

        Raises:
            SenderLostError: the sender is gone.
        """
        try:
            message = self.channel.receive(timeout)
        except ConnectionError as error:
            raise SenderLostError(f"the sender is gone: {error}") from error
        if message is not None:
            self._sort(message)
        return message is not None

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def _sort(self, message: Message) -> None:
        if message.get("type") == "key":
            self._put_key(message)
        else:
            self._messages.append(message)
