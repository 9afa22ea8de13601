"""Finds the processes that a test has started and must not leave behind."""

from __future__ import annotations

import os
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from sync_plugin_std.workers import fork_server_pids


def descendants() -> set[int]:
    """Return the ids of the processes that descend from this one (Linux).

    Fork servers and other processes that `multiprocessing` starts once and keeps are left out: they
    end with this process.
    """
    parents = {
        int(path.parent.name): _parent_of(path)
        for path in Path("/proc").glob("*/stat")
        if path.parent.name.isdigit()
    }
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= level
    return found - fork_server_pids() - _kept()


def _kept() -> set[int]:
    """Return the processes that `multiprocessing` keeps, if it still has these names."""
    server = getattr(forkserver, "_forkserver", None)
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    pids = getattr(server, "_forkserver_pid", None), getattr(tracker, "_pid", None)
    return {pid for pid in pids if pid is not None}


def _parent_of(stat: Path) -> int | None:
    try:
        # The name before it is in parentheses, and may contain anything.
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
