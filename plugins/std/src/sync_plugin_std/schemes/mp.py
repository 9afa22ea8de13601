"""The scheme ``mp``: workers that have a pipe to the trainer, and no more than that."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

from sync_core import (
    Address,
    OptionError,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.errors import AddressError
from sync_plugin_std.local import (
    Channel,
    LocalPeer,
    Message,
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedSlots,
)
from sync_plugin_std.schemes.shm import check_platform


@dataclass(frozen=True)
class PipeOptions:
    """Options of the scheme ``mp``.

    Args:
        slots: how many versions may lie in shared memory at a time; see `ShmOptions`.
        directory: a directory in memory for the slots; None for anonymous memory.
    """

    slots: int | None = None
    directory: str | None = None


class PipeScheme:
    """Messages go through pipes; the weights themselves through shared memory.

    `Sender` makes a pipe for each address, which travels as an argument of a
    ``multiprocessing.Process``, in a ``multiprocessing`` queue or pipe, or in a worker group's
    call. Pipes that exist already are given as ``workers=``; the worker then joins its end to
    the address by `with_pipe`.
    """

    capabilities = frozenset(
        {"broadcast", "late_join", "zero_copy", "cross_process", "descriptors"}
    )

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        check_platform()
        if context.side == "sender":
            return PipeSender(context)
        if not isinstance(context.endpoint, PipeEnd):
            raise AddressError(
                "the sender of this address was given pipes, so the worker gives its own end: "
                "Receiver(with_pipe(address, connection), model)"
            )
        return SharedMemoryReceiver(context, context.endpoint.connect())


class PipeEnd:
    """The worker's end of a pipe, which can be pickled for a child process, and is used there.

    A receiver uses it. While that is open another one, which takes its place, gets a further pipe,
    whose other end goes to the sender through the first.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end: socket.socket | None = end
        self._channel: weakref.ref[Channel] | None = None

    def connect(self) -> Channel:
        """Return the receiver's connection to the sender.

        Raises:
            AddressError: the receiver that has used it is closed.
        """
        before = None if self._channel is None else self._channel()
        if self._end is None and before is not None and before.fileno() >= 0:
            mine, theirs = socket.socketpair()
            with theirs, suppress(ConnectionError):
                # The handshake says that the sender is gone.
                before.send({"type": "pipe"}, [theirs.fileno()])
            channel = Channel(mine)
        else:
            with self._open_end() as end:
                channel = Channel(end.dup())
            self._end = None
        self._channel = weakref.ref(channel)
        return channel

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        descriptor = self._open_end().fileno()
        try:
            return _unpickle, (DupFd(descriptor),)
        except OSError as error:
            if error.errno is not None:
                raise
            # multiprocessing's own: it listens on a socket in TMPDIR, of at most 107 bytes.
            raise AddressError(
                "TMPDIR must be a path of at most 70 bytes for scheme 'mp', which passes pipes "
                f"over a unix socket there, got {tempfile.gettempdir()!r}: {error}; type "
                "TMPDIR=/tmp, or use scheme='shm'"
            ) from error

    def _open_end(self) -> socket.socket:
        if self._end is None or self._end.fileno() < 0:
            raise AddressError(
                "an address of scheme 'mp' is good until its receiver is closed; "
                "get a new one by sender.address(worker_id)"
            )
        return self._end


class PipeSender(SharedMemorySender[LocalPeer]):
    """Makes a pipe for each address, or uses those it is given."""

    def __init__(self, context: TransportContext) -> None:
        options = context.parse_options(PipeOptions)
        self._given = bool(context.workers)
        # Our copies of the workers' ends of pipes, until their receivers have joined.
        self._ends: dict[LocalPeer, socket.socket] = {}
        # Workers whose pipe has brought another one.
        self._succeeded: weakref.WeakSet[LocalPeer] = weakref.WeakSet()
        with ExitStack() as opened:
            given = [opened.enter_context(_socket_of(worker)) for worker in context.workers]
            super().__init__(context, SharedSlots(options.directory), limit=options.slots)
            opened.pop_all()
        for worker_id, connection in zip(context.worker_ids, given, strict=False):
            self.connect(connection, worker_id)

    def address(self, worker_id: int) -> PipeEnd | None:
        """The worker's end of a new pipe; None when the worker has one already."""
        if self._given:
            return None
        mine, theirs = socket.socketpair()
        self._ends[self.connect(mine, worker_id)] = theirs
        return PipeEnd(theirs)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, over its pipe where the others were given theirs."""
        super().add_worker(worker_id)
        if worker is not None:
            self.connect(_socket_of(worker), worker_id)

    def handle(self, peer: LocalPeer, message: Message) -> None:
        """Serve the pipe of a receiver that takes the place of this one; each has one successor."""
        if message["type"] != "pipe":
            super().handle(peer, message)
            return
        if peer in self._succeeded:
            raise ValueError("a second pipe")
        self._succeeded.add(peer)
        descriptor = peer.channel.pop_descriptor()
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self.connect(connection, peer.worker_id)

    def welcome(self, peer: LocalPeer) -> None:
        """Also close our copy of the worker's end, so that its death closes the last one."""
        super().welcome(peer)
        self._close_end(peer)

    def remove_worker(self, worker_id: int) -> None:
        """Also close our copies of the worker's ends, so that pipes no process uses are closed."""
        super().remove_worker(worker_id)
        for peer in tuple(self._ends):
            if peer.expected == worker_id:
                self._close_end(peer)

    def close(self) -> None:
        """Also close the ends of pipes that were not used."""
        super().close()
        for peer in tuple(self._ends):
            self._close_end(peer)

    def _close_end(self, peer: LocalPeer) -> None:
        end = self._ends.pop(peer, None)
        if end is not None:
            end.close()


def with_pipe(address: Address, connection: Connection) -> Address:
    """The address, reached through the worker's own end of the pipe that the sender was given.

    Args:
        address: an address of scheme ``mp`` whose sender was given ``workers=pipes``.
        connection: the worker's end, used for nothing else from now on.
    """
    return dataclasses.replace(address, endpoint=PipeEnd(_socket_of(connection)))


def _socket_of(connection: Connection) -> socket.socket:
    try:
        duplicate = socket.socket(fileno=os.dup(connection.fileno()))
    except (OSError, AttributeError) as error:
        raise OptionError(
            f"{connection!r} is not a duplex pipe; make it by multiprocessing.Pipe(duplex=True)"
        ) from error
    return duplicate


def _unpickle(duplicate: Any) -> PipeEnd:
    try:
        return PipeEnd(socket.socket(fileno=duplicate.detach()))
    except (AuthenticationError, ConnectionError, EOFError, FileNotFoundError) as error:
        raise AddressError(
            "an address of scheme 'mp' can be unpickled once, by a process that multiprocessing "
            "has started for the sender's: as an argument of multiprocessing.Process, or from a "
            "multiprocessing queue or pipe; for other processes use scheme='shm' or 'dist'"
        ) from error
