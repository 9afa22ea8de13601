"""The trainer's side of a run: writes versions and the head, and removes unused objects."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sync_core import Payload
from sync_core.errors import PayloadError
from sync_plugin_store.errors import ConflictError, SignatureError, StoreError, not_newer
from sync_plugin_store.format import (
    HEAD,
    Head,
    Manifest,
    Piece,
    digest_of,
    is_name,
    manifest_name,
    object_name,
)
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.leases import leased_versions, store_time
from sync_plugin_store.named import NamedObjects, check_unused
from sync_plugin_store.objects import LONGEST_RECORD, Found, ListedObject, Objects, is_temporary
from sync_plugin_store.pieces import PieceWriter
from sync_plugin_store.records import PARTS, SESSION, pieces_of_record, read_record_name

__all__ = ["RunPublisher"]

_log = logging.getLogger("sync_core")
# Attempts to replace the head while other processes name versions.
_ATTEMPTS = 10


class RunPublisher:
    """Publishes a run's versions and removes old ones; the only writer of the run.

    Args:
        objects: where the run is.
        key: signs the head. A run that exists already must have this key.
        keep: how many versions are kept.
        piece_nbytes: the size of a piece of a version, in bytes.
        grace: how long to keep objects of dropped versions, for readers that still read them, in
            seconds.
        streams: the number of concurrent writes.
        chunks: whether readers can check parts of a version.
        session: the session of the ranks that write versions together; "" for a single process.

    Raises:
        ConflictError: the place has the run of another trainer.
        OptionError: the place has other files and no run.
        StoreError: the store cannot be reached.
    """

    def __init__(
        self,
        objects: Objects,
        key: SigningKey,
        *,
        keep: int = 5,
        piece_nbytes: int = 16 << 20,
        grace: float = 600.0,
        streams: int = 8,
        chunks: bool = False,
        session: str = "",
    ) -> None:
        self._objects = objects
        self._key = key
        self._keep = keep
        self._grace = grace
        self.session = session
        # The digests of objects that kept versions refer to, but that are missing or truncated.
        self._lost: set[str] = set()
        # By name: the listed records of the run's ranks, and the objects that they refer to.
        self._records: dict[str, tuple[ListedObject, tuple[Piece, ...]]] = {}
        # Objects of dropped versions: when they may be removed, and their names.
        self._leaving: deque[tuple[float, list[str]]] = deque()
        # Guards the head and the known state of the store; held while both change.
        self._lock = threading.RLock()
        self._head, self._tag = self._begin()
        # The last head that this process tried to write.
        self._writing = self._head
        # Only these objects may be removed.
        self._named = NamedObjects(objects, self._head.run)
        self._manifests = self._read_manifests()
        #: Writes the pieces of versions.
        self.writer = PieceWriter(
            objects, piece_nbytes=piece_nbytes, streams=streams, chunks=chunks
        )

    @property
    def head(self) -> Head:
        """The head that was written last."""
        return self._head

    @property
    def run(self) -> str:
        """The run's id."""
        return self._head.run

    def publish(
        self,
        payload: Payload,
        *,
        base: int = 0,
        base_digest: str = "",
        anchor: bool = False,
        address: bytes | None = None,
    ) -> str:
        """Write a version and then the head, so that readers find the version.

        Args:
            payload: the version; its tensors may change once this returns.
            base: the version that an increment builds on; 0 for a whole version.
            base_digest: the digest of the base's manifest.
            anchor: whether increments may build on the version.
            address: the readers' address, to publish with the run.

        Returns:
            The digest of the version's manifest.

        Raises:
            StoreError: the store failed; readers keep the version they have.
            ConflictError: another trainer has written to the run.
        """
        self.check_newer(payload.version)
        # No reader can use a part of an increment.
        written = self.writer.write(payload, self.known, divided=not base)
        manifest = Manifest(
            run=self.run,
            version=payload.version,
            base=base,
            base_digest=base_digest,
            created=round(time.time(), 3),
            pieces=written.pieces,
            chunks=written.chunks,
            anchor=anchor,
        )
        return self.commit(manifest, address=address)

    def abandon(self) -> None:
        """Record the objects of failed sends, so that they can be removed later."""
        left = self.writer.take_written()
        self._named.note(left)
        self.writer.name(self.run, self._head.version + 1, left)

    @property
    def known(self) -> set[str]:
        """The digests of the objects of kept versions, except lost objects."""
        found = {piece.digest for m in self._manifests.values() for piece in m.objects}
        return found - self._lost

    def check_newer(self, version: int) -> None:
        """Raise `ConflictError` unless a version is newer than all those of the run."""
        if version <= self._head.version:
            raise not_newer(self._objects.url, self._head.version, version)

    def commit(
        self,
        manifest: Manifest,
        *,
        address: bytes | None = None,
        after: Mapping[int, int] = MappingProxyType({}),
    ) -> str:
        """Publish a version whose objects are in the store: write its manifest, then the head.

        Args:
            manifest: the version's manifest.
            address: the readers' address, to publish with the run.
            after: by rank, a version with pieces that the rank did not write again.

        Raises:
            StoreError: a version in ``after`` is no longer kept, or the store failed.
        """
        self._catch_up()
        for rank, version in after.items():
            if version not in self._head.versions:
                raise StoreError(
                    f"rank {rank} has not written again what it wrote of version {version}, which "
                    "is not kept any longer; send the next version"
                )
        data = manifest.to_bytes()
        if len(data) > LONGEST_RECORD:
            raise StoreError(
                f"the manifest of version {manifest.version} has {len(data)} bytes, and readers "
                f"take {LONGEST_RECORD} at most; give a larger piece_mb="
            )
        digest = digest_of(data)
        self._objects.put(manifest_name(digest), data)
        self._named.note_manifest(digest, manifest)
        # Objects of failed sends.
        left = self.writer.take_written(manifest.objects)
        self._named.note(left)
        self._let_go([object_name(piece.digest) for piece in left])
        found = None
        if address is not None:
            found = digest_of(address)
            if found != self._head.address:
                self._objects.put(object_name(found), address)
        with self._lock:
            self._manifests[manifest.version] = manifest
            self._lost.difference_update(piece.digest for piece in manifest.objects)
            addressed = self._head.address
            self._replace(
                lambda head: {
                    "version": manifest.version,
                    **self._leave({**head.versions, manifest.version: digest}, head.names),
                    "address": found or head.address,
                    "closed": False,
                }
            )
            if addressed not in (None, self._head.address):
                self._let_go([object_name(addressed or "")])
        try:
            self._drop_left()
            self._remove_due()
        except StoreError as error:
            # The version can be read.
            _log.warning("what is not kept stays in %s: %s", self._objects.url, error)
        return digest

    def name(self, version: int, name: str) -> None:
        """Name a version, which keeps it; a name that exists already moves.

        Raises:
            StoreError: the version is not kept, or the name is not valid.
        """
        if not is_name(name):
            raise StoreError(
                f"a name of a version must have letters, digits and ._- and not only digits, got "
                f"{name!r}"
            )

        def named(head: Head) -> dict[str, Any]:
            if version not in head.versions:
                raise StoreError(
                    f"version {version} is not in {self._objects.url}, which has "
                    f"{sorted(head.versions)}; the trainer keeps more with keep="
                )
            return {"names": {**head.names, name: version}}

        with self._lock:
            self._replace(named, beside=True)

    def forget_name(self, name: str) -> None:
        """Remove a name; the next publication drops versions that nothing else keeps."""
        with self._lock:
            self._replace(
                lambda head: {"names": {n: v for n, v in head.names.items() if n != name}},
                beside=True,
            )

    def collect(self) -> int:
        """Remove objects that no kept version refers to, such as those of interrupted sends.

        If objects of kept versions are missing, for example after a loss of power, the next version
        that needs them writes them again.

        Objects that this session's ranks have written for an unpublished version stay. So do
        objects that were dropped or, by the store's clock, written within the grace period.

        Objects that no manifest or record of this run names also stay. They belong to others, or to
        a trainer that was killed during a send or after a failed one.

        Returns:
            The number of removed objects.
        """
        with self._lock:
            manifests = list(self._objects.list("manifests/"))
            listed = [*self._objects.list("objects/"), *manifests]
            records = list(self._objects.list(PARTS))
            self._named.read(each.name for each in manifests)
            read = self._read_records(records)
            self._records = {name: self._records[name] for name in read}
            sizes = {each.name: each.nbytes for each in listed}
            needed = (piece for m in self._manifests.values() for piece in m.objects)
            self._lost = {p.digest for p in needed if sizes.get(object_name(p.digest)) != p.nbytes}
            now = store_time([*listed, *records])
            standing = self._standing() | self._standing_records(read)
            standing.update(name for _, names in self._leaving for name in names)
            gone = [
                each.name
                for each in (*listed, *records)
                if now - each.modified > self._grace
                and each.name not in standing
                and (each.name in self._named or each.name in read or is_temporary(each.name))
            ]
            # A manifest stays as long as an object that perhaps no other manifest names.
            left = sizes.keys() - standing.union(gone)
            gone = [name for name in gone if left.isdisjoint(self._named.objects_of(name))]
            self._delete(gone)
            return len(gone)

    def note_record(self, record: ListedObject, pieces: tuple[Piece, ...]) -> None:
        """Remember a rank's record and the objects that it refers to."""
        with self._lock:
            self._records[record.name] = record, pieces
            self._named.note(pieces)

    def remove_records(self, version: int) -> None:
        """Remove the ranks' records of versions up to this one and of sessions that have ended.

        Raises:
            StoreError: the store failed.
        """
        with self._lock:
            old = []
            for each in self._objects.list(PARTS):
                session, sent, _ = read_record_name(each.name) or (self.session, 0, 0)
                if session != self.session or 0 < sent <= version:
                    old.append(each)
            read = self._read_records(old)
            published = f"-{self._head.version}-"
            others = {p for name, ps in read.items() if published not in name for p in ps}
            if others:
                standing = self._standing()
                pieces = [piece for piece in others if object_name(piece.digest) not in standing]
                self.writer.name(self.run, version, pieces)
            for name in read:
                self._objects.delete(name)
                self._records.pop(name, None)

    def close(self) -> None:
        """Mark the run as closed, and end the threads."""
        self.writer.close()
        self.abandon()
        with self._lock:
            if not self._head.closed and self._tag is not None:
                try:
                    self._replace(lambda _: {"closed": True})
                except StoreError as error:
                    _log.warning("readers do not learn that the sender is closed: %s", error)

    def _begin(self) -> tuple[Head, str | None]:
        """Return the head of the existing run, or the head of a new one."""
        found = self._objects.look(HEAD)
        check_unused(self._objects, found, self._key.path)
        if found is None:
            return Head(run=secrets.token_hex(16), sequence=0), None
        try:
            return Head.from_bytes(found.data, self._key.public), found.tag
        except SignatureError as error:
            if not found.data:
                raise
            raise ConflictError(
                f"the run in {self._objects.url} was signed with another key; give the key of its "
                "trainer, Sender(…, key='FILE'), or another url"
            ) from error

    def _read_manifests(self) -> dict[int, Manifest]:
        found = {}
        for version, digest in self._head.versions.items():
            record = self._objects.look(manifest_name(digest))
            if record is not None and digest_of(record.data) == digest:
                manifest = found[version] = Manifest.from_bytes(record.data)
                self._named.note_manifest(digest, manifest)
        return found

    def _replace(
        self, change: Callable[[Head], dict[str, Any]], *, beside: bool = False
    ) -> Mapping[int, str]:
        """Replace the head, again if another process has changed its names meanwhile.

        Args:
            change: a function from the old head to the fields that change.
            beside: whether another process may publish versions at the same time.

        Returns:
            The versions of the old head.
        """
        self._catch_up()
        for _ in range(_ATTEMPTS):
            before = self._head
            self._writing = replace(before, sequence=before.sequence + 1, **change(before))
            try:
                self._tag = self._objects.swap(HEAD, self._writing.to_bytes(self._key), self._tag)
            except ConflictError:
                found = self._objects.look(HEAD)
                standing = None if found is None else self._read_head(found)
                if standing is None or found is None or standing.run != before.run:
                    break
                if standing.version != before.version and not beside:
                    break
                self._head, self._tag = standing, found.tag
                continue
            self._head = self._writing
            return before.versions
        raise ConflictError(
            f"another trainer writes to the run in {self._objects.url}; end it, or give one of "
            "them another url"
        )

    def _catch_up(self) -> None:
        """Adopt a head that was written although Ctrl-C or a lost answer hid the success."""
        with self._lock:
            if self._writing == self._head:
                return
            found = self._objects.look(HEAD)
            if found is not None and self._read_head(found) == self._writing:
                self._head, self._tag = self._writing, found.tag

    def _read_head(self, found: Found) -> Head | None:
        try:
            return Head.from_bytes(found.data, self._key.public)
        except (SignatureError, PayloadError):
            return None

    def _leave(self, versions: Mapping[int, str], names: Mapping[str, int]) -> dict[str, Any]:
        """Return a head's entries, with the versions that only a lease may keep as leaving."""
        leaving = versions.keys() - self._kept(versions, names)
        return {"versions": versions, "leaving": tuple(sorted(leaving))}

    def _kept(self, versions: Iterable[int], names: Mapping[str, int]) -> set[int]:
        """Return the versions that are kept for another reason than a lease."""
        newest = sorted(versions)[-self._keep :]
        return self._with_bases({*newest, *names.values()})

    def _drop_left(self) -> None:
        """Drop the versions that nothing keeps, not even a lease.

        The head already lists them as leaving, so no reader can lease them any more.
        """
        with self._lock:
            before: Mapping[int, str] = {}
            if self._head.leaving:
                before = self._replace(self._without_left)
            # Includes publications that failed after their manifest was written.
            left = {v: m for v, m in self._manifests.items() if v not in self._head.versions}
            names = {v: digest_of(m.to_bytes()) for v, m in left.items()}
            names |= {v: d for v, d in before.items() if v not in self._head.versions}
            self._drop(names)

    def _without_left(self, head: Head) -> dict[str, Any]:
        leased = leased_versions(self._objects, head.run, head.leaving)
        kept = self._kept(head.versions, head.names) | self._with_bases(leased)
        gone = set(head.leaving) - kept
        return {
            "versions": {v: digest for v, digest in head.versions.items() if v not in gone},
            "leaving": (),
        }

    def _with_bases(self, versions: Iterable[int]) -> set[int]:
        """Return versions together with their bases."""
        kept, todo = set[int](), list(versions)
        while todo:
            version = todo.pop()
            if version in kept:
                continue
            kept.add(version)
            manifest = self._manifests.get(version)
            if manifest is not None and manifest.base:
                todo.append(manifest.base)
        return kept

    def _drop(self, versions: Mapping[int, str]) -> None:
        """Schedule the removal of objects that only these versions refer to, after the grace."""
        names = []
        for version in versions:
            manifest = self._manifests.pop(version, None)
            if manifest is not None:
                names += [object_name(piece.digest) for piece in manifest.objects]
        # Manifests last, since they prove that the objects are the run's.
        self._let_go([*names, *map(manifest_name, versions.values())])

    def _let_go(self, names: list[str]) -> None:
        if names:
            self._leaving.append((time.monotonic() + self._grace, names))

    def _remove_due(self) -> None:
        with self._lock:
            gone: list[str] = []
            while self._leaving and self._leaving[0][0] <= time.monotonic():
                gone += self._leaving.popleft()[1]
            if gone and self.session:
                # Another rank may have written an object again meanwhile; the store has the time.
                self.collect()
                return
            standing = self._standing() if gone else set()
            self._delete(name for name in dict.fromkeys(gone) if name not in standing)

    def _standing(self) -> set[str]:
        """Return the names of the objects and manifests of kept versions."""
        names = {manifest_name(digest) for digest in self._head.versions.values()}
        names |= {object_name(p.digest) for m in self._manifests.values() for p in m.objects}
        # A manifest that could not be read may refer to anything.
        if self._head.versions.keys() - self._manifests.keys():
            names |= {each.name for each in self._objects.list("objects/")}
        if self._head.address is not None:
            names.add(object_name(self._head.address))
        return names

    def _standing_records(self, records: Mapping[str, tuple[Piece, ...]]) -> set[str]:
        """Return the names of the session's records and of the objects that they refer to."""
        names = set[str]()
        if not self.session:
            return names
        for name, pieces in records.items():
            session, version, _ = read_record_name(name) or (self.session, 0, 0)
            if session == self.session:
                names.add(name)
                if not 0 < version <= self._head.version:
                    names.update(object_name(piece.digest) for piece in pieces)
        return names

    def _read_records(self, listed: Iterable[ListedObject]) -> dict[str, tuple[Piece, ...]]:
        """Return the trainer's own records, each with the objects that it refers to.

        The signature identifies them, even if the ranks ended before the run had a head.
        """
        read = dict[str, tuple[ListedObject, tuple[Piece, ...]]]()
        for each in listed:
            if each.name != SESSION and read_record_name(each.name) is None:
                continue
            known = self._records.get(each.name)
            pieces = known[1] if known is not None and known[0] == each else self._pieces_of(each)
            if pieces is not None:
                read[each.name] = each, pieces
                self._named.note(pieces)
        self._records |= read
        return {name: pieces for name, (_, pieces) in read.items()}

    def _pieces_of(self, record: ListedObject) -> tuple[Piece, ...] | None:
        if record.nbytes > LONGEST_RECORD:
            return None
        found = self._objects.look(record.name)
        return None if found is None else pieces_of_record(found.data, self._key.public)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._objects.delete(name)
                self._named.forget(name)
            except StoreError as error:
                # Each further delete might take as long. The next sender's `collect` removes the
                # rest.
                _log.warning("%s and others stay in %s: %s", name, self._objects.url, error)
                return
