"""The trainer's side of a run: writes versions, the head, and removes what nothing refers to."""

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
from sync_plugin_store.errors import ConflictError, SignatureError, StoreError
from sync_plugin_store.format import (
    HEAD,
    Head,
    Manifest,
    digest_of,
    is_name,
    manifest_name,
    object_name,
)
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.leases import leased_versions, store_time
from sync_plugin_store.objects import LONGEST_RECORD, Found, Listed, Objects
from sync_plugin_store.pieces import PieceWriter
from sync_plugin_store.records import PARTS, SESSION, pieces_of_record, read_record_name

__all__ = ["Publisher"]

_log = logging.getLogger("sync_core")
# Of replacing the head, while other processes name versions.
_ATTEMPTS = 10


class Publisher:
    """Writes the versions of one run; the only one that does.

    Args:
        objects: where the run is.
        key: what the head is signed with. A run that is there already must be of this key.
        keep: how many versions are kept.
        piece_nbytes: the size of a piece of a version, in bytes.
        grace: how long what is not kept any longer stays for those that read it, in seconds.
        streams: how many objects are written at a time.
        chunks: whether readers can check parts of a version.
        session: of the ranks that write versions together; "" for one process that writes alone.

    Raises:
        ConflictError: the run that is there is another trainer's.
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
        # The digests of objects that kept versions refer to, and that are not there as a whole.
        self._lost: set[str] = set()
        # The records of the session's ranks as they were listed, and what they refer to, by name.
        self._records: dict[str, tuple[Listed, set[str]]] = {}
        # Of what is not kept any longer: when it may go, and its names.
        self._leaving: deque[tuple[float, list[str]]] = deque()
        # For the head, and what is known of the store; held while both change.
        self._lock = threading.RLock()
        self._head, self._tag = self._begin()
        # The head that was to be written last, whether or not it was.
        self._writing = self._head
        self._manifests = self._read_manifests()
        #: Writes the pieces of versions.
        self.writer = PieceWriter(
            objects, piece_nbytes=piece_nbytes, streams=streams, chunks=chunks
        )

    @property
    def head(self) -> Head:
        """The head as it was written last."""
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
        anchor: bool = False,
        address: bytes | None = None,
    ) -> str:
        """Write a version, and then the head: from then on readers find it.

        Args:
            payload: the version; its tensors are read when this returns.
            base: the version that it builds on; 0 for a whole one.
            anchor: whether increments may build on it.
            address: what readers need to know of this run beside its versions.

        Returns:
            The digest of its manifest.

        Raises:
            StoreError: the store failed; readers keep what they have.
            ConflictError: another trainer has written to the run.
        """
        self.check_newer(payload.version)
        # Of an increment, no reader can use a part.
        written = self.writer.write(payload, self.known, divided=not base)
        manifest = Manifest(
            run=self.run,
            version=payload.version,
            base=base,
            created=round(time.time(), 3),
            pieces=written.pieces,
            chunks=written.chunks,
            anchor=anchor,
        )
        return self.commit(manifest, address=address)

    @property
    def known(self) -> set[str]:
        """The digests of the objects of the versions that are kept, but for those that are lost."""
        found = {piece.digest for m in self._manifests.values() for piece in m.objects}
        return found - self._lost

    def check_newer(self, version: int) -> None:
        """Raise `ConflictError` unless a version is newer than those of the run."""
        if version <= self._head.version:
            raise not_newer(self._objects.url, self._head.version, version)

    def commit(
        self,
        manifest: Manifest,
        *,
        address: bytes | None = None,
        after: Mapping[int, int] = MappingProxyType({}),
    ) -> str:
        """Write a manifest, the objects of which are there, and then the head; see `publish`.

        Args:
            manifest: of the version.
            address: what readers need to know of this run beside its versions.
            after: versions whose pieces were not written again, by the rank that says so.

        Raises:
            StoreError: such a version is not kept any longer, or as `publish`.
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
        found = None
        if address is not None:
            found = digest_of(address)
            if found != self._head.address:
                self._objects.put(object_name(found), address)
        with self._lock:
            self._manifests[manifest.version] = manifest
            self._lost.difference_update(piece.digest for piece in manifest.objects)
            before = self._replace(
                lambda head: {
                    "version": manifest.version,
                    "versions": self._kept(
                        {**head.versions, manifest.version: digest}, head.names.values()
                    ),
                    "address": found or head.address,
                    "closed": False,
                }
            )
            # Also of publications that have failed after their manifest was written.
            names = {v: digest_of(m.to_bytes()) for v, m in self._left().items()}
            names |= {v: d for v, d in before.items() if v not in self._head.versions}
            self._drop(names)
        try:
            self._remove_due()
        except StoreError as error:
            # The version can be read.
            _log.warning("what is not kept stays in %s: %s", self._objects.url, error)
        return digest

    def name(self, version: int, name: str) -> None:
        """Give a version a name, which keeps it; a name that another version has moves.

        Raises:
            StoreError: the version is not kept, or the name is not one.
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
        """Take a name away; what nothing else keeps goes with the next publication."""
        with self._lock:
            self._replace(
                lambda head: {"names": {n: v for n, v in head.names.items() if n != name}},
                beside=True,
            )

    def collect(self) -> int:
        """Remove what no kept version refers to, such as parts of a publication that was cut short.

        Objects that kept versions refer to, and that are not there, are written again when they are
        needed: the machine may have lost power.

        What ranks of this session have written stays, for a version that is not published yet, and
        what has been dropped stays for the grace. So do younger objects, by the store's clock.

        Returns:
            How many objects were removed.
        """
        with self._lock:
            listed = [*self._objects.list("objects/"), *self._objects.list("manifests/")]
            records = list(self._objects.list(PARTS))
            sizes = {each.name: each.nbytes for each in listed}
            needed = (piece for m in self._manifests.values() for piece in m.objects)
            self._lost = {p.digest for p in needed if sizes.get(object_name(p.digest)) != p.nbytes}
            now = store_time([*listed, *records])
            standing = self._standing() | self._standing_records(records)
            standing.update(name for _, names in self._leaving for name in names)
            old = [each for each in (*listed, *records) if now - each.modified > self._grace]
            gone = [each.name for each in old if each.name not in standing]
            self._delete(gone)
            return len(gone)

    def close(self) -> None:
        """Write that no version follows, and end the threads."""
        self.writer.close()
        with self._lock:
            if not self._head.closed and self._tag is not None:
                try:
                    self._replace(lambda _: {"closed": True})
                except StoreError as error:
                    _log.warning("readers do not learn that the sender is closed: %s", error)

    def _begin(self) -> tuple[Head, str | None]:
        """Return the head of the run that is there, or that of a new one."""
        found = self._objects.look(HEAD)
        if found is None:
            return Head(run=secrets.token_hex(16), sequence=0), None
        try:
            return Head.from_bytes(found.data, self._key.public), found.tag
        except SignatureError as error:
            raise ConflictError(
                f"the run in {self._objects.url} was signed with another key; give the key of its "
                "trainer, Sender(…, key='FILE'), or another url"
            ) from error

    def _read_manifests(self) -> dict[int, Manifest]:
        found = {}
        for version, digest in self._head.versions.items():
            record = self._objects.look(manifest_name(digest))
            if record is not None and digest_of(record.data) == digest:
                found[version] = Manifest.from_bytes(record.data)
        return found

    def _replace(
        self, change: Callable[[Head], dict[str, Any]], *, beside: bool = False
    ) -> Mapping[int, str]:
        """Replace the head, also where another process has given a version a name meanwhile.

        Args:
            change: returns the fields that change, from the head that is replaced.
            beside: whether another process may publish versions meanwhile.

        Returns:
            The versions of the head that was replaced.
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
        """Take note of a head that was written, where Ctrl-C or a lost answer hid that."""
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

    def _kept(self, versions: Mapping[int, str], named: Iterable[int]) -> dict[int, str]:
        """Return those of the versions that something keeps."""
        newest = sorted(versions)[-self._keep :]
        kept = self._with_bases({*newest, *named})
        if not kept.issuperset(versions):
            kept |= self._with_bases(leased_versions(self._objects, versions, self._grace))
        return {version: digest for version, digest in versions.items() if version in kept}

    def _with_bases(self, versions: Iterable[int]) -> set[int]:
        """Return versions and those that they build on."""
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

    def _left(self) -> dict[int, Manifest]:
        """Return the manifests of versions that are not kept."""
        return {v: m for v, m in self._manifests.items() if v not in self._head.versions}

    def _drop(self, versions: Mapping[int, str]) -> None:
        """Let what only these versions refer to go when its grace is over."""
        if not versions:
            return
        names = [manifest_name(digest) for digest in versions.values()]
        for version in versions:
            manifest = self._manifests.pop(version, None)
            if manifest is not None:
                names += [object_name(piece.digest) for piece in manifest.objects]
        self._leaving.append((time.monotonic() + self._grace, names))

    def _remove_due(self) -> None:
        with self._lock:
            gone: list[str] = []
            while self._leaving and self._leaving[0][0] <= time.monotonic():
                gone += self._leaving.popleft()[1]
            if gone and self.session:
                # Another rank may have written an object again meanwhile: the store knows when.
                self.collect()
                return
            standing = self._standing() if gone else set()
            self._delete(name for name in dict.fromkeys(gone) if name not in standing)

    def _standing(self) -> set[str]:
        """Return the names that kept versions refer to."""
        names = {manifest_name(digest) for digest in self._head.versions.values()}
        names |= {object_name(p.digest) for m in self._manifests.values() for p in m.objects}
        # A manifest that could not be read may refer to anything.
        if self._head.versions.keys() - self._manifests.keys():
            names |= {each.name for each in self._objects.list("objects/")}
        if self._head.address is not None:
            names.add(object_name(self._head.address))
        return names

    def _standing_records(self, records: Iterable[Listed]) -> set[str]:
        """Return the names of the records of the session's ranks, and of what they refer to."""
        names = set[str]()
        if not self.session:
            return names
        read = dict[str, tuple[Listed, set[str]]]()
        for each in records:
            if each.name != SESSION and not each.name.startswith(f"{PARTS}{self.session}-"):
                continue
            names.add(each.name)
            record = read_record_name(each.name)
            if record is not None and not 0 < record[1] <= self._head.version:
                known = self._records.get(each.name)
                pieces = self._pieces_of(each) if known is None or known[0] != each else known[1]
                read[each.name] = each, pieces
                names |= pieces
        self._records = read
        return names

    def _pieces_of(self, record: Listed) -> set[str]:
        found = self._objects.look(record.name)
        pieces = () if found is None else pieces_of_record(found.data, self._key.public)
        return {object_name(piece.digest) for piece in pieces}

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._objects.delete(name)
            except StoreError as error:
                # Each further one might take as long. The next sender's `collect` finds them.
                _log.warning("%s and others stay in %s: %s", name, self._objects.url, error)
                return


def not_newer(url: str, newest: int, version: int) -> ConflictError:
    """Return the error of a version that is not newer than those of a run.

    Args:
        url: where the run is.
        newest: its newest version.
        version: the other one.
    """
    return ConflictError(
        f"the run in {url} has version {newest}, and versions only grow, got {version}; type "
        f"Sender(…, version={newest}) to continue the run, or give another url"
    )
