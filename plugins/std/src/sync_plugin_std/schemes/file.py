"""The scheme ``file``: each version of the weights is a safetensors file in a directory."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from sync_core import (
    OptionError,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.transports import uninterrupted
from sync_plugin_std.schemes.left_files import remove_left
from sync_plugin_std.stores import Store, StoreOptions, store_transport
from sync_plugin_std.stores.store import LONGEST_RECORD, NotAFileError

# Opens a file that only its user may read.
_open_private = partial(os.open, mode=0o600)


def _open_plainly(path: str, flags: int) -> int:
    more = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags | more)


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
    """Workers look into a directory for the newest version that is meant for them.

    A sender removes its files when closed. The next sender in the directory removes the files of
    a killed one: at once on the same machine, else after an hour.
    """

    capabilities = frozenset({"broadcast", "cross_host", "cross_process", "late_join", "pull"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        options = context.parse_options(FileOptions)
        directory = Path(options.directory or tempfile.gettempdir())
        # Unlike pathlib's, it raises for no name, such as one that is too long.
        if not os.path.isdir(directory):  # noqa: PTH112
            raise OptionError(
                f"scheme 'file': there is no directory {str(directory)!r} on this machine; make "
                "it, or mount it"
            )
        if context.side == "sender":
            remove_left(directory)
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
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with ExitStack() as opened:
                with uninterrupted():
                    file = opened.enter_context(open(part, "xb", opener=_open_private))
                file.writelines(parts)
            part.replace(path)
        except BaseException:
            # The disk is full, or Ctrl-C: what was written would stay there for good.
            part.unlink(missing_ok=True)
            raise

    def get(self, name: str) -> bytes | None:
        """Return the bytes of a record; None for what is not a file, or too long for a record."""
        try:
            with self._open(name) as file:
                size = os.fstat(file.fileno()).st_size
                # All of the memory for so many bytes is allocated first.
                data = file.read(min(size, LONGEST_RECORD) + 1)
        except (FileNotFoundError, NotAFileError):
            return None
        return data if len(data) <= LONGEST_RECORD else None

    def get_into(self, name: str, allocate: Callable[[int], memoryview]) -> bool:
        """Read a file into memory, without a copy between."""
        try:
            with self._open(name) as file:
                memory = allocate(os.fstat(file.fileno()).st_size)
                while memory and (count := file.readinto(memory)):
                    memory = memory[count:]
        except FileNotFoundError:
            return False
        if memory:
            raise OSError(f"{name} ended {len(memory)} bytes before its size")
        return True

    def _open(self, name: str) -> FileIO:
        """Open a file without waiting, as a pipe would have it, and without following a link."""
        path = self._directory / name
        try:
            file = FileIO(path, "rb", opener=_open_plainly)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise NotAFileError(f"{path} is a link or a device, not a file") from error
            raise
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise NotAFileError(f"{path} is not a regular file")
        return file

    def delete(self, name: str) -> None:
        """Remove a file, and the sender's own directory with the last of them."""
        path = self._directory / name
        with suppress(IsADirectoryError):  # which another has put there
            path.unlink(missing_ok=True)
        with suppress(OSError):  # there are others in it
            path.parent.rmdir()
