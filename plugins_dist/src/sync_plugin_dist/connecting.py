"""How a worker reaches its sender: without the network where both are on one machine."""

from __future__ import annotations

import socket

from sync_core import SenderLostError, TransportContext
from sync_core.transports import connect_locally, same_user


def connect(context: TransportContext) -> socket.socket:
    """A connection to the sender, over a unix socket where there is one and it is this user's.

    Raises:
        SenderLostError: nobody answers.
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
            f"nobody answers at {endpoint.host}, port {endpoint.port}: the sender has closed or "
            "died, or its host cannot be reached from here; for other hosts, type "
            'Sender("dist", …, host=<an address of the trainer that they reach>)'
        ) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
