"""Copy a run near its readers, so that each version crosses a slow link only once."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from sync_core import SyncError
from sync_core.errors import PayloadError
from sync_plugin_store.errors import RolledBackError, SignatureError
from sync_plugin_store.format import (
    HEAD,
    Head,
    Manifest,
    Piece,
    digest_of,
    manifest_name,
    object_name,
    signed_by,
)
from sync_plugin_store.named import NamedObjects, check_unused
from sync_plugin_store.objects import Directory, Patience, is_temporary, open_objects
from sync_plugin_store.reader import RunReader
from sync_plugin_store.web import serve

__all__ = ["Mirror"]

_log = logging.getLogger("sync_core")
# How long `close` waits for the copy of an object, in seconds.
_CLOSING = 10.0


class Mirror:
    """Copies the newest version of a run into a directory, checks it, and serves it over HTTP.

    Nearby readers use `url` or the directory. They check signatures and digests themselves, so they
    need not trust the mirror.

    Args:
        url: where the run is.
        directory: the directory for the copy; made if missing.
        key: the trainer's public key, in hexadecimal; see `Run.key_of`.
        host: the address to listen on; with any but loopback, other hosts can read the weights.
        port: the port; 0 for a free one.
        poll: seconds between two looks for a new version.
        grace: how long to keep objects that the run has removed, for readers that still read them,
            in seconds.
        timeout: how long failed requests are retried, in seconds.

    Raises:
        OptionError: the directory is not empty and has no run.
        SignatureError: the directory has a run with another key.

    Example:
        >>> import tempfile, torch
        >>> from sync_core import Receiver, Sender
        >>> from sync_plugin_store import Run
        >>> policy, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as far, tempfile.TemporaryDirectory() as near:
        ...     with Sender("store", policy, url=far) as sender:
        ...         version = sender.send().version
        ...         with Mirror(far, near, Run.key_of(sender)) as mirror:
        ...             copied = mirror.update()
        ...             with Run(mirror.url, Run.key_of(sender)) as run:
        ...                 with Receiver(run.address(), copy) as receiver:
        ...                     received = receiver.receive()
        >>> received
        1
    """

    def __init__(
        self,
        url: str,
        directory: str,
        key: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        poll: float = 1.0,
        grace: float = 600.0,
        timeout: float = 60.0,
    ) -> None:
        self._key = key
        self._reader = RunReader([open_objects(url, timeout)], key, timeout=timeout)
        path = Path(directory)
        self._copy = Directory(path, directory)
        found = self._copy.look(HEAD)
        check_unused(self._copy, found)
        if found is not None and found.data:
            # Replace another run only if it has the same key.
            signed_by(key, found.data, f"{HEAD} in {directory}")
        path.mkdir(parents=True, exist_ok=True)
        # Only these objects may be removed.
        self._named: NamedObjects | None = None
        self._poll, self._grace = poll, grace
        # The manifests of the copied versions.
        self._manifests: dict[int, Manifest] = {}
        # The names of the objects whose bytes were checked.
        self._checked = set[str]()
        # By object: when it was first seen to be unneeded.
        self._unneeded: dict[str, float] = {}
        self._updating = threading.Lock()
        self._ended = threading.Event()
        self._closed = ExitStack()
        #: The URL for readers.
        self.url = self._closed.enter_context(serve(directory, host, port))
        #: The newest version that was copied.
        self.version = 0
        self._thread = threading.Thread(target=self._follow, name="sync-mirror", daemon=True)
        self._thread.start()

    def update(self) -> int:
        """Copy the newest version, unless it was copied already, and return it.

        Raises:
            SyncError: the version cannot be read or written; the copy stays as it is.
        """
        with self._updating:
            head = self._reader.look()
            if head is None:
                return 0
            self._manifests = self._wanted(head)
            for version, manifest in self._manifests.items():
                digest = head.versions[version]
                # First, since the manifest proves that the objects are the run's.
                self._copy_record(manifest_name(digest), digest)
                self._copy_objects(manifest)
            if head.address is not None:
                self._copy_record(object_name(head.address), head.address)
            self._write_head(head)
            self.version = head.version
            self._remove(head)
            return self.version

    def close(self) -> None:
        """Stop the server and the threads; the directory stays as it is."""
        self._ended.set()
        self._reader.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING)
        self._closed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self.update()
            except SyncError as error:
                if not self._ended.is_set():
                    _log.warning("the mirror of a run waits: %s", error)
            self._ended.wait(self._poll)

    def _wanted(self, head: Head) -> dict[int, Manifest]:
        """Return the versions to copy: the newest, the named ones, and their bases."""
        wanted, todo = dict[int, Manifest](), [head.version, *head.names.values()]
        while todo:
            version = todo.pop()
            if not version or version in wanted or version not in head.versions:
                continue
            known = self._manifests.get(version)
            if known is not None and known.digest == head.versions[version]:
                manifest = known
            else:
                manifest = self._reader.manifest(version)
            wanted[version] = manifest
            todo.append(manifest.base)
        return wanted

    def _copy_objects(self, manifest: Manifest) -> None:
        for piece in manifest.objects:
            name = object_name(piece.digest)
            if not self._has(name, piece):
                data = bytearray(piece.nbytes)
                self._reader.read_piece(piece, memoryview(data), manifest.version)
                self._copy.put(name, memoryview(data))
                self._checked.add(name)

    def _copy_record(self, name: str, digest: str) -> None:
        """Copy a small object unchanged, including entries that this release ignores."""
        found = self._copy.look(name)
        if found is None or digest_of(found.data) != digest:
            data = self._reader.read_record(name, digest)
            if data is not None:
                self._copy.put(name, data)

    def _write_head(self, head: Head) -> None:
        found = self._copy.look(HEAD)
        if found is not None:
            with suppress(SignatureError, PayloadError):
                copied = Head.from_bytes(found.data, self._key)
                if copied.run == head.run and copied.sequence > head.sequence:
                    # After a restart, the mirror's own head is the only record of what it has seen.
                    raise RolledBackError(
                        f"{self._copy.url} has version {copied.version} of the run, and where it "
                        f"is copied from an older head, of version {head.version}"
                    )
        if found is None or found.data != self._reader.head_bytes:
            self._copy.swap(HEAD, self._reader.head_bytes, None if found is None else found.tag)

    def _has(self, name: str, piece: Piece) -> bool:
        """Return whether an object was copied; check those of earlier processes once."""
        try:
            if (self._copy.path / name).stat().st_size != piece.nbytes:
                return False
        except OSError:
            return False
        if name not in self._checked:
            memory = memoryview(bytearray(piece.nbytes))
            self._copy.read(name, 0, memory, Patience(0.0, self._ended), whole=True)
            if digest_of(memory) != piece.digest:
                return False
            self._checked.add(name)
        return True

    def _remove(self, head: Head) -> None:
        """Remove objects that the run has not needed for the grace period."""
        needed = {manifest_name(digest) for digest in head.versions.values()}
        copied = self._manifests.values()
        needed |= {object_name(piece.digest) for each in copied for piece in each.objects}
        if head.address is not None:
            needed.add(object_name(head.address))
        manifests = [each.name for each in self._copy.list("manifests/")]
        if self._named is None:
            self._named = NamedObjects(self._copy, head.run)
        self._named.read(manifests)
        if head.address is not None:
            self._named.note([Piece(head.address, 0)])
        now = time.monotonic()
        # Manifests last, since they prove that the objects are the run's.
        listed = [*(each.name for each in self._copy.list("objects/")), *manifests]
        unneeded = [name for name in listed if name not in needed and self._removable(name)]
        self._checked &= needed
        self._unneeded = {name: self._unneeded.get(name, now) for name in unneeded}
        for name, since in self._unneeded.items():
            if now - since > self._grace:
                self._copy.delete(name)

    def _removable(self, name: str) -> bool:
        assert self._named is not None
        return name in self._named or is_temporary(name)
