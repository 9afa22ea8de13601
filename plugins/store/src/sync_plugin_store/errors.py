"""Errors of runs in stores."""

from __future__ import annotations

from sync_core import SyncError

__all__ = [
    "ConflictError",
    "ReplacedError",
    "RolledBackError",
    "SignatureError",
    "StoreError",
    "not_newer",
]


class StoreError(SyncError, OSError):
    """A store could not be read or written within the deadline."""


class ConflictError(StoreError):
    """Another process, such as a second trainer of the run, has replaced an object first."""


class ReplacedError(StoreError):
    """An object was replaced between two requests that read parts of it."""


class SignatureError(SyncError, ValueError):
    """The head of a run is not signed with the key in the address."""


class RolledBackError(SyncError):
    """A store shows an older head of a run than before, for longer than caches may."""


def not_newer(url: str, newest: int, version: int) -> ConflictError:
    """Return the error for publishing a version that is not newer than those of a run.

    Args:
        url: where the run is.
        newest: its newest version.
        version: the version to publish.
    """
    return ConflictError(
        f"the run in {url} has version {newest}, and versions only grow, got {version}; type "
        f"Sender(…, version={newest}) to continue the run, or give another url"
    )
