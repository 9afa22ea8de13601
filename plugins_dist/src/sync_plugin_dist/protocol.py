"""The messages between the sender and the receivers of ``dist``.

Control goes over a connection that the worker opens, by TCP or, on the sender's machine, by a unix
socket. In the latter case the worker reads a version in the slot where it was packed, and all is as
`sync_plugin_std.local.SharedMemorySender` says. To the others the weights go over process groups
that the sender opens and names by numbers; it is at rank 0 of each.

========  ======================================  ==============================================
from      message                                 meaning
========  ======================================  ==============================================
both      `sync_plugin_std.local.shake_hands`      the beginning: both know the token
sender    ``welcome``                             accepted
sender    ``offer``, version                      there is a newer version for this worker
worker    ``take``                                it waits for the newest version now
sender    ``wire``, number, rank, size            join this process group
both      ``key``, number, key, value             how to find an end of it; the sender passes it on
sender    ``data``, number, version, digest, …    the version follows, in so many bytes, over it
sender    ``sum``, number, version, sum           its SHA-256, where other workers pass it on
sender    ``again``                               leave the process group; ``take`` if need be
sender    ``nothing``                             there is nothing newer any more
worker    ``received``, version                   it has come whole, and is staged
worker    ``broken``, number                      the process group failed here
worker    ``give_up``                             interrupted: it takes back its ``take``
sender    ``given_up``                            confirms that; messages before it are void
worker    ``answer``, answer                      committed, or not
worker    ``leave``, reason                       it closes its receiver
sender    ``gone``, reason                        refused, replaced, removed, or the sender closes
========  ======================================  ==============================================

No byte of a version is sent before the worker has taken an offer, so a worker that does not receive
delays no other; none is applied before all have arrived, with the version's number after them. In
a broadcast the members of a process group pass parts on to each other, and one may pass on others.
So a worker says ``received`` once what has come has the ``sum``, and otherwise ``broken``.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, fields
from typing import Self

from sync_core import OptionError
from sync_plugin_std.local import Message, close_when_forked


@dataclass(frozen=True, slots=True)
class Transfer:
    """The announcement of a version that follows.

    Args:
        number: of the wire.
        version: the version.
        digest: of its layout.
        nbytes: its size.
        part: the size of the parts in which it comes.
    """

    number: int
    version: int
    digest: str
    nbytes: int
    part: int

    @classmethod
    def from_message(cls, message: Message, most: int) -> Self:
        """The transfer that a message announces.

        Args:
            message: what the sender says.
            most: the size of the largest version that there may be, in bytes.

        Raises:
            ValueError: it announces none, or more bytes than there is any reason for.
        """
        transfer = cls(**{f.name: message[f.name] for f in fields(cls)})
        numbers = (transfer.number, transfer.version, transfer.nbytes, transfer.part)
        if any(type(n) is not int or n <= 0 for n in numbers) or type(transfer.digest) is not str:
            raise ValueError(f"{message!r:.200} announces no version")
        if transfer.nbytes > most:
            raise ValueError(
                f"it announces {transfer.nbytes} bytes, and no version has over {most}"
            )
        return transfer


@dataclass(slots=True)
class Farewell:
    """The unusual reason for which a receiver leaves its sender."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of a sender.

    Args:
        host: its name or address.
        port: of the connections for control.
        local: the name of a socket for those on this machine; empty for none.
        farewell: shared with the thread that closes the receiver.
    """

    host: str
    port: int
    local: str = ""
    farewell: Farewell | None = None

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise OptionError(f"a port must be a number from 1 to 65535, got {self.port}")
        try:
            self.host.encode("idna")
        except UnicodeError as error:
            raise OptionError(f"{self.host!r:.80} is not the name of a host: {error}") from error


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
        close_when_forked(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener
