"""Errors of runs in stores."""

from __future__ import annotations

from sync_core import SyncError

__all__ = ["ConflictError", "ReplacedError", "RolledBackError", "SignatureError", "StoreError"]


class StoreError(SyncError, OSError):
    """A store could not be read or written within the deadline."""


class ConflictError(StoreError):
    """Another process has replaced an object first, such as a second trainer of the same run."""


class ReplacedError(StoreError):
    """An object was replaced while it was read by several requests."""


class SignatureError(SyncError, ValueError):
    """The head of a run is not signed with the key of its address."""


class RolledBackError(SyncError):
    """A store has an older head of a run than it had before, and does not get the newer one."""
