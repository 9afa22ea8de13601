"""Directories for runs that need no place of their own, in the system's temporary directory."""

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
    """A new directory of this process; those of this user's processes that have died are removed.

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
            # Locked for as long as this process lives.
            owner = os.open(self.path / _OWNER, os.O_CREAT | os.O_RDWR, mode=0o600)
            self._owner: int | None = owner
            with suppress(BlockingIOError):
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Before it was locked, another process may have removed it.
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
        # Another user's, or one that is being removed; or its process lives and has the lock.
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _OWNER).open("r") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
