"""The receiver of a reader that the trainer does not know."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from sync_core import Answer, Layout, Payload, ReceiverTransport, SenderLostError, TransportContext
from sync_core.errors import PayloadError
from sync_plugin_store.errors import StoreError
from sync_plugin_store.format import Head, Manifest
from sync_plugin_store.reader import ChainFetch, GoneError, RunReader, notify

if TYPE_CHECKING:
    from sync_plugin_store.increments import IncrementReader
    from sync_plugin_store.parts import PartFetch, Parts

__all__ = ["ReadingReceiver"]

_log = logging.getLogger("sync_core")


class ReadingReceiver(ReceiverTransport):
    """Reads the versions of a run, and leaves nothing.

    Args:
        context: what the core knows.
        reader: the run.
        version: the version to keep to; 0 for the newest.
        poll: seconds between two looks for a new version.
        parts: what is read of each version; None for all.
    """

    def __init__(
        self,
        context: TransportContext,
        reader: RunReader,
        *,
        version: int,
        poll: float,
        parts: Parts | None = None,
    ) -> None:
        layout = Layout(()) if context.layout is None else context.layout
        self._most_nbytes = layout.most_nbytes
        self._reader = reader
        self._parts = parts
        self._pinned = version
        self._poll = poll
        self._next_look = 0.0
        self._seen = 0
        self._fetch: ChainFetch | PartFetch | None = None
        # Made with the first increment, or version on which one may build.
        self._increments: IncrementReader | None = None
        # Of the versions that are kept: what was read of them, and those that could not be read.
        self._manifests: dict[int, Manifest] = {}
        self._broken = set[int]()
        self._woken = False
        self._changed = threading.Condition()
        self._process = os.getpid()

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version; what is not there in time arrives for the next call."""
        deadline = time.monotonic() + timeout
        while True:
            if self._fetch is None:
                self._look()
            payload = self._finish(deadline)
            if payload is not None:
                return payload
            left = deadline - time.monotonic()
            pause = min(left, self._next_look - time.monotonic())
            with self._changed:
                if left <= 0 or self._changed.wait_for(lambda: self._woken, max(0.0, pause)):
                    return None

    def acknowledge(self, answer: Answer) -> None:
        """Do nothing: the trainer does not know of this reader."""

    def wake(self) -> None:
        """Let `receive` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """End what is being read; in a process that was forked from this one, do nothing."""
        if os.getpid() == self._process:
            self._reader.close()

    def _look(self) -> None:
        """Begin to fetch the newest version, if there is one that was not seen."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._poll
        head = self._reader.look()
        if head is None:
            return
        version = self._pinned or head.version
        if version <= self._seen:
            self._check_open(head)
            return
        self._manifests = {v: m for v, m in self._manifests.items() if v in head.versions}
        self._broken.clear()
        try:
            if self._parts is None or self._pinned:
                self._begin(self._chain(version))
            else:
                chain = self._newest(head)
                self._begin(chain)
                if not chain:
                    self._check_open(head)
        except GoneError:
            if self._pinned:
                raise
            self._next_look = 0.0
        except PayloadError as error:
            self._replace(version, error)

    def _check_open(self, head: Head) -> None:
        """Raise `SenderLostError` where no version follows."""
        if head.closed and not self._pinned:
            raise SenderLostError(f"the trainer has closed its sender after version {head.version}")

    def _begin(self, chain: list[Manifest]) -> None:
        """Begin to fetch a version, last, and those that it needs."""
        for each in chain:
            if each.nbytes > self._most_nbytes:
                self._seen = chain[-1].version
                raise PayloadError(
                    f"version {each.version} has {each.nbytes} bytes, and there is reason for "
                    f"{self._most_nbytes} at most"
                )
        if not chain:
            return
        if self._parts is None and not chain[-1].ranks:
            self._fetch = self._reader.fetch_chain(chain, lambda: notify(self._changed))
        else:
            self._fetch = self._reader.fetch_parts(
                chain[-1], lambda: notify(self._changed), self._parts
            )

    def _replace(self, version: int, error: Exception) -> None:
        """Fetch the newest version that does without what could not be read, or raise the error."""
        head = self._reader.head
        chain = [] if head is None or self._pinned else self._newest(head)
        if not chain:
            raise PayloadError(str(error)) from error
        _log.warning("version %d is read instead of %d: %s", chain[-1].version, version, error)
        self._begin(chain)
        self._next_look = 0.0

    def _newest(self, head: Head) -> list[Manifest]:
        """Return the newest version that can be read, last, and those that it needs."""
        for version in sorted(head.versions, reverse=True):
            if version <= self._seen:
                break
            if version in self._broken:
                continue
            try:
                chain = self._chain(version)
            except PayloadError:
                continue  # a base is gone or cannot be read
            # No part of an increment can be read.
            divided = self._parts is not None and chain[-1].base
            if not divided and self._broken.isdisjoint(each.version for each in chain):
                return chain
        return []

    def _chain(self, version: int) -> list[Manifest]:
        """Return a version, last, and those that it needs before it."""
        chain = [self._manifest(version)]
        if self._parts is not None:
            return chain
        while self._needs_base(chain[-1]):
            base = chain[-1].base
            if base >= chain[-1].version:
                raise PayloadError(f"version {chain[-1].version} cannot build on version {base}")
            chain.append(self._manifest(base))
        return chain[::-1]

    def _needs_base(self, manifest: Manifest) -> bool:
        if not manifest.base:
            return False
        return self._increments is None or self._increments.needs(manifest)

    def _manifest(self, version: int) -> Manifest:
        found = self._manifests.get(version)
        if found is None:
            try:
                found = self._manifests[version] = self._reader.manifest(version)
            except PayloadError:
                self._broken.add(version)
                raise
        return found

    def _finish(self, deadline: float) -> Payload | None:
        """Return the version that has come; None where none is on its way, or not in time."""
        fetch = self._fetch
        if fetch is None:
            return None
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: fetch.ended or self._woken, left)
        if not fetch.ended:
            return None
        self._fetch = None
        version = fetch.manifest.version
        try:
            payload = self._make(fetch)
        except GoneError:
            if self._pinned:
                raise
            self._next_look = 0.0
            return None
        except (PayloadError, StoreError) as error:
            self._broken.add(fetch.broken or version)
            self._replace(version, error)
            return None
        self._seen = version
        return payload

    def _make(self, fetch: ChainFetch | PartFetch) -> Payload:
        """Return a version, whole, or its parts."""
        if isinstance(fetch, ChainFetch):
            blocks = fetch.result()
            chain = [each.manifest for each in fetch.fetches]
            if self._increments is None and any(each.anchor or each.base for each in chain):
                # Loads the increments of scale, for which others need not wait.
                from sync_plugin_store.increments import IncrementReader

                self._increments = IncrementReader()
            if self._increments is not None:
                return self._increments.make(chain, blocks, fetch.began)
            (block,) = blocks
        else:
            block = fetch.result()
        return Payload.unpack(block, fetch.manifest.version, since=fetch.began)
