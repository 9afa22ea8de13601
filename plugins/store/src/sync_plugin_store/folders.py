"""Temporary directories for runs whose user gives no URL."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["OwnFolder"]

_PREFIX = "sync-store-"
_OWNER = ".owner"


class OwnFolder:
    """A temporary directory of this process. Making one removes those of dead processes.

    Example:
        >>> folder = OwnFolder()
        >>> folder.path.is_dir()
        True
        >>> folder.close()
        >>> folder.path.exists()
        False
    """

    def __init__(self) -> None:
        _remove_left(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            # This process holds the lock for as long as it lives.
            owner = os.open(self.path / _OWNER, os.O_CREAT | os.O_RDWR, mode=0o600)
            self._owner: int | None = owner
            with suppress(BlockingIOError):
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have removed the directory before it was locked.
                if (self.path / _OWNER).exists():
                    return
            os.close(owner)

    def close(self) -> None:
        """Remove the directory. Closing again is allowed."""
        owner, self._owner = self._owner, None
        if owner is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(owner)


def _remove_left(directory: Path) -> None:
    for path in directory.glob(f"{_PREFIX}*"):
        # Skip directories of other users and of live processes, and those that are being removed.
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _OWNER).open("r") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
