"""What the scheme can do, its options, and which class is which side."""

from __future__ import annotations

from dataclasses import dataclass

from sync_core import ReceiverTransport, SenderTransport, TransportContext, hookimpl
from sync_plugin_file.receiver import FileReceiver
from sync_plugin_file.sender import FileSender


@dataclass(frozen=True)
class FileOptions:
    """Options of the scheme ``file``.

    Args:
        directory: where the files are; None for the system's temporary directory.
        keep: how many versions are left there, for other tools and slow workers.
        lost_after: seconds without a sign of life after which a peer counts as dead.
    """

    directory: str | None = None
    keep: int = 2
    lost_after: float = 5.0


class FileScheme:
    """Workers look into a directory for the newest version that is meant for them."""

    capabilities = frozenset({"broadcast", "cross_host", "cross_process", "late_join", "pull"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        options = context.parse_options(FileOptions)
        if context.side == "receiver":
            return FileReceiver(context, options.lost_after)
        return FileSender(context, options.directory, options.keep, options.lost_after)
