"""What the scheme can do, and its options; the rest is what `sync_core.store_transport` makes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from sync_core import (
    ReceiverTransport,
    SenderTransport,
    StoreOptions,
    TransportContext,
    hookimpl,
    store_transport,
)
from sync_plugin_file.store import DirectoryStore


@dataclass(frozen=True)
class FileOptions(StoreOptions):
    """Options of the scheme ``file``.

    Args:
        directory: where the files are; None for the system's temporary directory.
        poll: seconds between two looks into the directory.
        lost_after: seconds without a sign of life after which a peer counts as dead.
        keep: how many versions are left there, for other tools and slow workers.
    """

    directory: str | None = None


class FileScheme:
    """Workers look into a directory for the newest version that is meant for them."""

    capabilities = frozenset({"broadcast", "cross_host", "cross_process", "late_join", "pull"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        options = context.parse_options(FileOptions)
        directory = Path(options.directory or tempfile.gettempdir())
        return store_transport(context, DirectoryStore(directory), options)
