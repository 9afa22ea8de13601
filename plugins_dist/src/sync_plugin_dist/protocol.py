"""How the sender and the receivers of ``dist`` talk.

Control goes over a TCP connection that the worker opens; the weights over process groups that the
sender opens and names by numbers. The sender is at rank 0 of each.

========  ======================================  ==============================================
from      message                                 meaning
========  ======================================  ==============================================
worker    ``hello``, token, worker, pid           the first message of a connection
sender    ``welcome``                             accepted
sender    ``offer``, version                      there is a newer version for this worker
worker    ``take``                                it waits for the newest version now
sender    ``wire``, number, rank, size            join this process group
sender    ``data``, number, version, digest, …    the version follows, in so many bytes, over it
sender    ``again``                               leave the process group; ``take`` if need be
sender    ``nothing``                             there is nothing newer any more
worker    ``received``, version                   it has come whole, and is staged
worker    ``broken``, number                      the process group failed here
worker    ``answer``, answer                      committed, or not
sender    ``gone``, reason                        refused, replaced, removed, or the sender closes
========  ======================================  ==============================================

No byte of a version is sent before the worker has taken an offer, so a worker that does not receive
is in nobody's way; and none is applied before all have come, with the version's number after them.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a sender listens.

    Args:
        host: its name or address.
        port: of the connections for control.
        store_port: of the store by which process groups come together.
    """

    host: str
    port: int
    store_port: int


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine, and on no other.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener
