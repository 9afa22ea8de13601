"""Tracks the objects that belong to a run: only these may be replaced or removed.

The same directory or bucket may have files of other people and programs, even below ``objects/``
and with names that look like the run's. An object belongs to a run if one of its manifests has
named it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sync_core import OptionError
from sync_core.errors import PayloadError
from sync_plugin_store.errors import StoreError
from sync_plugin_store.format import (
    HEAD,
    Manifest,
    Piece,
    digest_of,
    manifest_digest,
    manifest_name,
    object_name,
)
from sync_plugin_store.objects import Directory, Found, Objects, is_temporary

__all__ = ["NamedObjects", "check_unused"]

# Names of objects that may exist before the run has a head.
_FORM = re.compile(
    r"(?:channels/[0-9a-f]{16}/)?(?:|\.lock|\.owner|objects/[0-9a-f]{64}|manifests/[0-9a-f]{64}\.json"
    r"|(?:leases|parts)/[^/]+\.json|answers/sync-[0-9a-f]{16}/[^/]+)"
)


class NamedObjects:
    """The names of the objects and manifests that belong to a run.

    Args:
        objects: the store with the run.
        run: the run's id.

    Example:
        >>> named = NamedObjects(Directory(Path("runs"), "runs"), "0" * 32)
        >>> named.note([Piece("1" * 64, 8)])
        >>> object_name("1" * 64) in named, object_name("2" * 64) in named
        (True, False)
    """

    def __init__(self, objects: Objects, run: str) -> None:
        self._objects = objects
        self._run = run
        self._names = set[str]()
        # By name: manifests that were read; None for those of other runs. Manifests never change.
        self._read: dict[str, Manifest | None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def note(self, pieces: Iterable[Piece]) -> None:
        """Add objects of the run."""
        self._names.update(object_name(piece.digest) for piece in pieces)

    def note_manifest(self, digest: str, manifest: Manifest) -> None:
        """Add a manifest of the run and the objects that it names."""
        name = manifest_name(digest)
        self._read[name] = manifest
        self._names.add(name)
        self.note(manifest.objects)

    def read(self, names: Iterable[str]) -> None:
        """Read manifests, and add the run's own."""
        for name in names:
            digest = manifest_digest(name)
            if digest is None or name in self._read:
                continue
            self._read[name] = None
            with suppress(StoreError, PayloadError):
                found = self._objects.look(name)
                if found is not None and digest_of(found.data) == digest:
                    manifest = Manifest.from_bytes(found.data)
                    if manifest.run == self._run:
                        self.note_manifest(digest, manifest)

    def forget(self, name: str) -> None:
        """Drop the name of a removed object."""
        self._names.discard(name)
        self._read.pop(name, None)

    def objects_of(self, name: str) -> set[str]:
        """Return the names of the objects in a manifest of the run."""
        manifest = self._read.get(name)
        return {object_name(piece.digest) for piece in manifest.objects} if manifest else set()


def check_unused(objects: Objects, head: Found | None, key_file: Path | None = None) -> None:
    """Raise `OptionError` if a place for a run has other files and no run.

    Args:
        objects: the place for the run.
        head: its `HEAD`, if any.
        key_file: the trainer's key file, which may be in the place.
    """
    if head is not None:
        if head.data and not head.data.startswith(b"ed25519 "):
            raise OptionError(
                f"{HEAD} in {objects.url} begins with {head.data[:20]!r}, and is not that of a "
                f"run; {_advice(objects)}"
            )
        return
    for name in objects.walk():
        if _FORM.fullmatch(name) or is_temporary(name):
            continue
        if key_file is not None and isinstance(objects, Directory):
            path = objects.path / name
            # Another rank may be making the key file.
            if path.parent == key_file.parent and path.name.lstrip(".").startswith(key_file.name):
                continue
        raise OptionError(
            f"{objects.url} holds other things, such as {name!r}, and no run; {_advice(objects)}"
        )


def _advice(objects: Objects) -> str:
    return f"give a run a place of its own, such as {objects.url.rstrip('/') + '/runs/policy'!r}"
