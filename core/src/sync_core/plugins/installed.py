"""What is installed: the entry points of all distributions, read again only when that changes."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from importlib_metadata import Distribution, EntryPoint, EntryPoints, entry_points


def entry_points_of(group: str) -> list[EntryPoint]:
    """The entry points of a group, sorted by name; a distribution seen twice counts once.

    Every sender and receiver looks plugins up, and to read the metadata of all distributions takes
    tens of milliseconds. What is installed or removed changes the folder that it is in, by which
    `importlib_metadata` tells too whether its own list of such a folder still holds.

    Args:
        group: such as ``"sync.schemes"``.

    Example:
        >>> "bf16" in {entry.name for entry in entry_points_of("sync.layers")}
        True
    """
    found = _read(tuple(map(_state_of, sys.path))).select(group=group)
    return sorted(found, key=lambda entry: (entry.name, str(owner_of(entry))))


def owner_of(entry: EntryPoint) -> tuple[str | None, str | None]:
    """The name and version of the distribution that an entry point comes from."""
    known: Any = entry.dist  # hashable, which its type does not say
    return (None, None) if entry.dist is None else _name_and_version(known)


@lru_cache(maxsize=1)
def _read(path: object) -> EntryPoints:
    del path  # whose entry points these are
    return entry_points()


def _state_of(folder: str) -> object:
    try:
        found = Path(folder).stat()
    except OSError:
        return folder
    return folder, found.st_dev, found.st_ino, found.st_mtime_ns


# As many as there may be with plugins; those that are gone must not be kept for ever.
@lru_cache(maxsize=256)
def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    return distribution.name, distribution.version
