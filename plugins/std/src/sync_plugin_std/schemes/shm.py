"""The scheme ``shm``: workers on the same host, that connect by the address alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from sync_core import (
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_plugin_std.local import (
    Channel,
    LocalListener,
    LocalPeer,
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedSlots,
    connect_locally,
)


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
    endpoint_type = str

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        check_platform()
        if context.side == "receiver":
            return SharedMemoryReceiver(context, _channel(context))
        return ShmSender(context)


class ShmSender(SharedMemorySender[LocalPeer]):
    """Listens on a unix socket with an unguessable name."""

    def __init__(self, context: TransportContext) -> None:
        options = context.parse_options(ShmOptions)
        self._listener = LocalListener()
        try:
            super().__init__(
                context,
                SharedSlots(options.directory),
                limit=options.slots,
                listeners=[self._listener.socket],
            )
        except BaseException:
            self._listener.close()
            raise

    def address(self, worker_id: int) -> str:
        """The socket's name, the same for every worker."""
        del worker_id
        return self._listener.name

    def torn_down(self) -> None:
        """Remove the socket where it is a file."""
        self._listener.close()


def _channel(context: TransportContext) -> Channel:
    try:
        return Channel(connect_locally(context.endpoint, context.timeout))
    except (OSError, ValueError) as error:
        # ValueError: the name has a lone surrogate.
        raise SenderLostError(
            "the sender is not there: it has closed or died, or runs on another host or in "
            "another network namespace, which scheme 'shm' does not reach"
        ) from error


def check_platform() -> None:
    """Raise `OSError` where there are no unix sockets to pass descriptors over."""
    if sys.platform == "win32":
        raise OSError("the schemes 'shm' and 'mp' need unix sockets; use 'thread' on Windows")
