"""Leases: small objects by which readers that may write keep versions."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from sync_plugin_store.errors import StoreError
from sync_plugin_store.objects import Listed, Objects

__all__ = ["LEASES", "Lease", "leased_versions", "store_time"]

#: The folder of the leases.
LEASES = "leases/"
_log = logging.getLogger("sync_core")
# A lease that was written wrongly keeps a version for this long at most, in seconds.
_LONGEST_LEASE = 30 * 86400.0
# A lease takes less, in bytes.
_LARGEST_LEASE = 1 << 12


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease of a version, for a reader that may write: a small object.

    Args:
        version: the version.
        seconds: how long it is kept from the time at which the lease was written.
    """

    version: int
    seconds: float

    def to_bytes(self) -> bytes:
        """Return the lease as it is stored."""
        return json.dumps({"version": self.version, "seconds": self.seconds}).encode()

    @classmethod
    def of(cls, data: bytes) -> Lease | None:
        """Return the lease that `to_bytes` wrote; None for anything else."""
        try:
            content = json.loads(data)
            return cls(int(content["version"]), min(float(content["seconds"]), _LONGEST_LEASE))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None


def leased_versions(objects: Objects, versions: Iterable[int], grace: float) -> set[int]:
    """Return the versions that readers have leases of, and remove the leases that have ended.

    Args:
        objects: where the run is.
        versions: those that are kept; all of them stay where a lease cannot be read.
        grace: how long a lease that is not one stays, in seconds: it may be on its way.
    """
    found = list(objects.list(LEASES))
    if not found:
        return set()
    # By the store's clock: a manifest has just been written.
    now = store_time(objects.list("manifests/"))
    leased = set[int]()
    for each in found:
        # Any reader may write them, and no one's lease may end a send.
        try:
            lease = _read(objects, each)
        except StoreError as error:
            _log.warning("a lease keeps all versions, since it cannot be read: %s", error)
            leased.update(versions)
            continue
        age = now - each.modified
        # Not true of a time that is not a number, or is years ahead.
        if lease is not None and -_LONGEST_LEASE < age <= lease.seconds:
            leased.add(lease.version)
        elif lease is not None or age >= grace:
            with suppress(StoreError):
                objects.delete(each.name)
    return leased


def store_time(listed: Iterable[Listed]) -> float:
    """Return the time by the store's clock: the newest object tells it, unless that is ahead."""
    return min(max((each.modified for each in listed), default=0.0), time.time())


def _read(objects: Objects, listed: Listed) -> Lease | None:
    if listed.nbytes > _LARGEST_LEASE:
        return None
    record = objects.look(listed.name)
    return None if record is None else Lease.of(record.data)
