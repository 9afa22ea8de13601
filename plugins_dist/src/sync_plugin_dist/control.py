"""A receiver's connection to its sender: messages in their order, until the sender is gone."""

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
    """A connection to the sender, over a unix socket where there is one and it is this user's.

    Raises:
        SenderLostError: there is no answer.
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
    """Messages to and from a sender; a wire's `Control`.

    Args:
        connection: a connected socket, owned from now on.
        put_key: takes the messages by which ends of wires find each other; they overtake others.
    """

    def __init__(self, connection: socket.socket, put_key: Callable[[Message], None]) -> None:
        self.channel = Channel(connection)
        self._put_key = put_key
        self._messages: deque[Message] = deque()

    def register(self, poll: select.poll) -> None:
        """Have a poll wait for messages, and for the sender's end."""
        self.channel.register(poll)

    def interrupts(self) -> bool:
        """Return whether the sender gives up the transfer, or is gone."""
        try:
            self.channel.read()
        except ConnectionError:
            return True
        while (message := self.channel.pop_message()) is not None:
            self._sort(message)
        return self.begins_again()

    def begins_again(self) -> bool:
        """Return whether that was among what was read."""
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
        """The next message, or None when none came in time.

        Raises:
            SenderLostError: the sender is gone, or says that it goes.
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
        """Return whether something came in time; it is kept, or was a key.

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
        """Hang up."""
        self.channel.close()

    def _sort(self, message: Message) -> None:
        if message.get("type") == "key":
            self._put_key(message)
        else:
            self._messages.append(message)
