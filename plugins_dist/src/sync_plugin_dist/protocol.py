"""The messages between the sender and the receivers of ``dist``.

Each worker opens a control connection to the sender: TCP, or a unix socket on the sender's machine.
Over a unix socket, the worker reads each version in the slot where it was packed, as in
`sync_plugin_std.local.SharedMemorySender`. Other workers receive the weights over process groups,
which the sender opens, identifies by numbers, and joins as rank 0.

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

The sender sends no byte of a version before the worker has taken an offer, so a worker that does
not receive delays no other. The worker applies no byte before all bytes and then the version's
number have arrived. In a broadcast, members pass parts on to each other, and a member could pass on
altered ones. So a worker answers ``received`` only if its data matches the ``sum``, and otherwise
``broken``.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, fields
from typing import Self

from sync_core import OptionError
from sync_plugin_std.local import Message, close_when_forked


@dataclass(frozen=True, slots=True)
class Transfer:
    """Announces the transfer of a version.

    Args:
        number: the number of the process group.
        version: the version.
        digest: the digest of its layout.
        nbytes: its size.
        part: the size of the parts in which it is sent.
    """

    number: int
    version: int
    digest: str
    nbytes: int
    part: int

    @classmethod
    def from_message(cls, message: Message, most: int) -> Self:
        """Return the transfer that a message announces.

        Args:
            message: the sender's message.
            most: the largest allowed size of a version, in bytes.

        Raises:
            ValueError: the message announces no transfer, or too many bytes.
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
    """The reason why a receiver leaves its sender, if it is unusual."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of a sender.

    Args:
        host: the sender's host name or address.
        port: the port for control connections.
        local: the name of a unix socket for workers on the sender's machine; empty for none.
        farewell: the reason to leave, shared with the thread that closes the receiver.
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
    """Return a socket that listens on only one address of this machine.

    Raises:
        OSError: the port is in use, or the address is not this machine's.
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
