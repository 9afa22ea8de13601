"""The scheme ``file``: each version of the weights is a safetensors file in a directory."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sync_core import (
    OptionError,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_plugin_std.stores import Store, StoreOptions, store_transport

# Opens a file that only its user may read.
_open_private = partial(os.open, mode=0o600)


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
        if not directory.is_dir():
            raise OptionError(
                f"scheme 'file': there is no directory {str(directory)!r} on this machine; make "
                "it, or mount it"
            )
        return store_transport(context, DirectoryStore(directory), options)


class DirectoryStore(Store):
    """Relies on whole files that appear by a rename, and on their names; on nothing else.

    Args:
        directory: what is mounted where the trainer is, and where the workers are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, name: str, data: bytes) -> None:
        """Put a file in its place."""
        self.put_parts(name, (memoryview(data),))

    def put_parts(self, name: str, parts: Iterable[memoryview]) -> None:
        """Put a file in its place by a rename, so that no reader sees half of it."""
        path = self._directory / name
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with open(part, "xb", opener=_open_private) as file:
                file.writelines(parts)
            part.replace(path)
        except BaseException:
            # The disk is full, or Ctrl-C: what was written would stay there for good.
            part.unlink(missing_ok=True)
            raise

    def get(self, name: str) -> bytes | None:
        """Return the bytes of a file."""
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def get_into(self, name: str, allocate: Callable[[int], memoryview]) -> bool:
        """Read a file into memory, without a copy between."""
        try:
            with (self._directory / name).open("rb", buffering=0) as file:
                memory = allocate(os.fstat(file.fileno()).st_size)
                while memory and (count := file.readinto(memory)):
                    memory = memory[count:]
        except FileNotFoundError:
            return False
        if memory:
            raise OSError(f"{name} ended {len(memory)} bytes before its size")
        return True

    def delete(self, name: str) -> None:
        """Remove a file, and the sender's own directory with the last of them."""
        path = self._directory / name
        path.unlink(missing_ok=True)
        with suppress(OSError):  # there are others in it
            path.parent.rmdir()
