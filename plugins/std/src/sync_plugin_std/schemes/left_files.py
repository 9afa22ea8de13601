"""Removal of what trainers that were killed have left in a directory of the scheme ``file``."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sync_plugin_std.stores.store import SENDER, machine

_log = logging.getLogger("sync_core")
_FOLDER = re.compile(r"sync-[0-9a-f]{16}")
# The names of files of a sender and its workers: records, versions, and files in progress.
_FILE = re.compile(r"sender\.json|worker-[0-9]+\.json|.*-[0-9]{8,}\.safetensors|\.[0-9a-f]{16}")
# No sender is as long without a sign of life, in seconds: it gives one ten times in `lost_after`.
_ABANDONED = 3600.0
# The longest record that is read, in bytes.
_LONGEST = 1 << 24


def remove_left(directory: Path) -> None:
    """Remove the folders of this user's senders whose process is dead.

    On this machine that is known at once. A sender elsewhere counts as dead when it has rewritten
    its record neither for an hour nor for twenty times its ``lost_after``; one that was only
    stopped loses the versions that it had put there, and continues with its next send. Files of
    other names stay.
    """
    for folder in directory.iterdir():
        if not _FOLDER.fullmatch(folder.name):
            continue
        try:
            if _is_abandoned(folder):
                for path in folder.iterdir():
                    if _FILE.fullmatch(path.name):
                        path.unlink()
                if any(folder.iterdir()):
                    continue
                folder.rmdir()
                _log.info("removed %s, which a trainer that is dead has left", folder)
        except FileNotFoundError:
            continue  # another sender has removed it meanwhile
        except OSError as error:
            # As text: the error holds the frames of the sender that is being made.
            text = str(error)
            _log.warning("cannot remove %s, which a dead trainer has left: %s", folder, text)


def _is_abandoned(folder: Path) -> bool:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    record: dict[str, Any] = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        written = (folder / SENDER).lstat()
        if not stat.S_ISREG(written.st_mode) or written.st_size > _LONGEST:
            return False
        found, record = written, _read(folder / SENDER)
    process, lost_after = record.get("process"), record.get("lost_after")
    if record.get("machine") == machine() != "" and type(process) is int:
        return not _lives(process)
    limit = _ABANDONED
    if isinstance(lost_after, int | float):
        limit = max(limit, 20 * lost_after)
    return time.time() - found.st_mtime > limit


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes().partition(b"\n")[2])
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
