"""Directories for runs that need no place of their own, in the system's temporary directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["make_folder"]

_PREFIX = "sync-store-"
_OWNER = ".owner"
# Locked for as long as this process lives, or until the folder is removed.
_held: dict[Path, IO[str]] = {}


def make_folder() -> Path:
    """Return a new directory, and remove those of this user's processes that have died.

    Example:
        >>> folder = make_folder()
        >>> folder.is_dir()
        True
        >>> shutil.rmtree(folder)
    """
    _remove_left(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    for gone in [path for path in _held if not path.exists()]:
        _held.pop(gone).close()
    owner = (folder / _OWNER).open("w")
    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _held[folder] = owner
    return folder


def _remove_left(directory: Path) -> None:
    for folder in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder in _held or folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _OWNER).open("r") as owner:
                # Its process has died if nothing holds the lock; else this raises.
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
