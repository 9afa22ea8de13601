"""A directory as a store: files that appear whole."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from sync_core import Store


class DirectoryStore(Store):
    """Relies on whole files that appear by a rename, and on their names; on nothing else.

    Args:
        directory: what is mounted where the trainer is, and where the workers are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, name: str, data: bytes) -> None:
        """Put a file in its place by a rename, so that nobody reads half of it."""
        path = self._directory / name
        path.parent.mkdir(exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(part).replace(path)

    def get(self, name: str) -> bytes | None:
        """What stands in a file."""
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Remove a file, and the sender's own directory with the last of them."""
        path = self._directory / name
        path.unlink(missing_ok=True)
        with suppress(OSError):  # there are others in it
            path.parent.rmdir()
