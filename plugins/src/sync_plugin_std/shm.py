"""The scheme ``shm``: workers on the same host, that connect by the address alone."""

from __future__ import annotations

import secrets
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sync_core import (
    Channel,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_plugin_std.protocol import check_platform
from sync_plugin_std.shared_receiver import SharedReceiver
from sync_plugin_std.shared_sender import SharedSender


@dataclass(frozen=True)
class ShmOptions:
    """Options of the scheme ``shm``.

    Args:
        slots: how many versions may lie in shared memory at a time. Two are made at the start;
            more only when they are needed. None: three, and one more for each further
            version that workers which do not get on still hold (with ``zero_copy``, what their
            models view), or that only some were sent, until they let go or get a newer one.
        directory: a directory in memory, such as ``/dev/shm``, for the slots; None for anonymous
            memory.
    """

    slots: int | None = None
    directory: str | None = None


class ShmScheme:
    """Weights are packed once, into shared memory from which every worker reads."""

    capabilities = frozenset({"broadcast", "late_join", "zero_copy", "cross_process"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        check_platform()
        if context.side == "receiver":
            return SharedReceiver(context, Channel(_connect(context.endpoint)))
        return ShmSender(context)


class ShmSender(SharedSender):
    """Listens on a unix socket with a name that nobody can guess."""

    def __init__(self, context: TransportContext) -> None:
        options = context.parse_options(ShmOptions)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._name = f"sync-core-{secrets.token_hex(16)}"
        if sys.platform == "linux":
            self._name = f"\0{self._name}"  # abstract: it is in no directory to be left behind
        else:
            self._folder = tempfile.TemporaryDirectory()
            self._name = str(Path(self._folder.name) / "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._name)
            listener.listen(128)
            super().__init__(
                context, slots=options.slots, directory=options.directory, listener=listener
            )
        except BaseException:
            listener.close()
            raise

    def address(self, worker_id: int) -> str:
        """The socket's name, the same for every worker."""
        del worker_id
        return self._name

    def close(self) -> None:
        """Also remove the socket where it is a file."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(name)
    except OSError as error:
        connection.close()
        raise SenderLostError(
            "the sender is not there: it has closed or died, or runs on another host or in "
            "another network namespace, which scheme 'shm' does not reach"
        ) from error
    return connection
