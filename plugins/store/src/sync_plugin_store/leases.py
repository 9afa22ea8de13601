"""Leases: small objects with which readers that can write to the store keep versions."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from sync_plugin_store.errors import StoreError
from sync_plugin_store.objects import ListedObject, Objects

__all__ = ["Lease", "lease_name", "leased_versions", "store_time"]

_LEASES = "leases/"
# Names from `lease_name`. Leases under other names, written by other programs, are respected but
# never removed.
_OURS = re.compile(rf"{_LEASES}[0-9a-f]{{16}}\.json")
_log = logging.getLogger("sync_core")
# A wrong lease keeps a version for at most this long, in seconds.
_LONGEST_LEASE = 30 * 86400.0
# An upper bound on the size of a lease, in bytes.
_LARGEST_LEASE = 1 << 12


def lease_name() -> str:
    """Return a new name for a lease."""
    return f"{_LEASES}{secrets.token_hex(8)}.json"


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader's request to keep a version for some time, stored as a small object.

    Args:
        version: the version.
        seconds: how long to keep it, from the time at which the lease was written.
        run: the run's id; "" if unknown.
    """

    version: int
    seconds: float
    run: str = ""

    def to_bytes(self) -> bytes:
        """Return the lease as it is stored."""
        content = {"version": self.version, "seconds": self.seconds, "run": self.run}
        return json.dumps(content).encode()

    @classmethod
    def of(cls, data: bytes) -> Lease | None:
        """Return the lease that `to_bytes` wrote; None for anything else."""
        try:
            content = json.loads(data)
            seconds = min(float(content["seconds"]), _LONGEST_LEASE)
            return cls(int(content["version"]), seconds, str(content.get("run", "")))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None


def leased_versions(objects: Objects, run: str, versions: Iterable[int]) -> set[int]:
    """Return the leased versions, and remove the run's expired leases.

    Args:
        objects: where the run is.
        run: the run's id.
        versions: the kept versions; all count as leased if a lease cannot be read.
    """
    found = list(objects.list(_LEASES))
    if not found:
        return set()
    # The store's clock: a manifest has just been written.
    now = store_time(objects.list("manifests/"))
    leased = set[int]()
    for each in found:
        # Any reader may write leases, and a bad one must not make a send fail.
        try:
            lease = _read(objects, each)
        except StoreError as error:
            _log.warning("a lease keeps all versions, since it cannot be read: %s", error)
            leased.update(versions)
            continue
        if lease is None or lease.run not in ("", run):
            continue
        # False for NaN and for times that are years ahead.
        if -_LONGEST_LEASE < now - each.modified <= lease.seconds:
            leased.add(lease.version)
        elif lease.run and _OURS.fullmatch(each.name):
            with suppress(StoreError):
                objects.delete(each.name)
    return leased


def store_time(listed: Iterable[ListedObject]) -> float:
    """Return the store's time: that of its newest object, but not later than this host's."""
    return min(max((each.modified for each in listed), default=0.0), time.time())


def _read(objects: Objects, listed: ListedObject) -> Lease | None:
    if listed.nbytes > _LARGEST_LEASE:
        return None
    record = objects.look(listed.name)
    return None if record is None else Lease.of(record.data)
