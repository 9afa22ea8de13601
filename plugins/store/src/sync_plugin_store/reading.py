"""The receiver of readers that the trainer does not know."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from sync_core import Answer, Payload, ReceiverTransport, SenderLostError, SyncError
from sync_core.errors import PayloadError
from sync_core.transports import uninterrupted
from sync_plugin_store.errors import StoreError
from sync_plugin_store.format import Head, Manifest
from sync_plugin_store.reader import ChainFetch, GoneError, RunReader, notify

if TYPE_CHECKING:
    from sync_plugin_store.increments import IncrementReader
    from sync_plugin_store.parts import PartFetch, Parts

__all__ = ["ReadingReceiver"]

_log = logging.getLogger("sync_core")
# How long a call waits for manifests in a directory past its deadline, in seconds.
_NEAR = 1.0
# The part of a chain that is read at a time takes one of this many shares of the memory limit. The
# other shares are for the kept version and its copies.
_SHARE = 4


class ReadingReceiver(ReceiverTransport):
    """Reads the versions of a run, without writing to the store.

    Args:
        reader: the reader of the run.
        version: the one version to receive; 0 for always the newest.
        poll: seconds between two looks for a new version.
        parts: the parts to read of each version; None for whole versions.
    """

    def __init__(
        self, reader: RunReader, *, version: int, poll: float, parts: Parts | None = None
    ) -> None:
        self._reader = reader
        self._parts = parts
        self._pinned = version
        self._poll = poll
        self._next_look = 0.0
        # The look in progress.
        self._looking: Future[ChainFetch | PartFetch | None] | None = None
        self._seen = 0
        self._fetch: ChainFetch | PartFetch | None = None
        # The version to reach; a long chain takes several fetches.
        self._target = 0
        # The version that could not be read, and the error.
        self._failure: tuple[int, Exception] | None = None
        # Made with the first increment or anchor.
        self._increments: IncrementReader | None = None
        # The manifests of kept versions, and the versions whose manifest could not be read.
        self._manifests: dict[int, Manifest] = {}
        self._broken = set[int]()
        self._woken = False
        self._changed = threading.Condition()
        self._process = os.getpid()

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version; one that is late arrives with the next call."""
        deadline = time.monotonic() + timeout
        while True:
            if self._fetch is None:
                self._look_until(deadline)
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
        """Make `receive` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all reads; in a process that was forked from this one, do nothing."""
        if os.getpid() == self._process:
            self._reader.close()

    def _look_until(self, deadline: float) -> None:
        """Look for a new version and begin to fetch it, on another thread.

        A silent server or a long chain of versions does not delay the caller.
        """
        if self._looking is None:
            if time.monotonic() < self._next_look:
                return
            self._next_look = time.monotonic() + self._poll
            if self._reader.near and self._failure is None:
                # On this thread, since starting another costs more than the look.
                head = self._reader.look()
                if head is None or not self._news(head):
                    return
                deadline = max(deadline, time.monotonic() + _NEAR)
            with uninterrupted():
                self._looking = Future()
                thread = threading.Thread(
                    target=self._run_look,
                    args=(self._looking,),
                    name="sync-store-look",
                    daemon=True,
                )
                thread.start()
        looking = self._looking
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: looking.done() or self._woken, left)
        if looking.done():
            self._looking = None
            self._fetch = looking.result()

    def _run_look(self, looking: Future[ChainFetch | PartFetch | None]) -> None:
        try:
            looking.set_result(self._look())
        except BaseException as error:
            looking.set_exception(error)
        notify(self._changed)

    def _look(self) -> ChainFetch | PartFetch | None:
        """Begin to fetch the newest version, unless it was seen already."""
        failure, self._failure = self._failure, None
        if failure is not None:
            return self._replace(*failure)
        head = self._reader.head if self._reader.near else self._reader.look()
        if head is None or not self._news(head):
            return None
        version = self._pinned or head.version
        self._forget_others(head)
        self._broken.clear()
        try:
            if self._parts is None or self._pinned:
                return self._begin(self._chain(version))
            chain = self._newest(head)
            if not chain:
                self._check_open(head)
            return self._begin(chain)
        except GoneError:
            if self._pinned:
                raise
            self._next_look = 0.0
            return None
        except PayloadError as error:
            return self._replace(version, error)

    def _forget_others(self, head: Head) -> None:
        """Drop manifests that the head does not name, as after a rollback of the run."""
        self._manifests = {
            v: m for v, m in self._manifests.items() if head.versions.get(v) == m.digest
        }

    def _news(self, head: Head) -> bool:
        """Return whether the run has a new version; see `_check_open`."""
        news = (self._pinned or head.version) > self._seen
        if not news:
            self._check_open(head)
        return news

    def _check_open(self, head: Head) -> None:
        """Raise `SenderLostError` if the run is closed."""
        if head.closed and not self._pinned:
            raise SenderLostError(f"the trainer has closed its sender after version {head.version}")

    def _begin(self, chain: list[Manifest]) -> ChainFetch | PartFetch | None:
        """Begin to fetch a chain of versions, or as many of its first as fit in memory."""
        if not chain:
            return None
        self._target = chain[-1].version
        try:
            self._reader.check_size(chain)
        except PayloadError:
            self._seen = self._target
            raise
        if self._parts is None and not chain[-1].ranks:
            sizes = accumulate(each.nbytes for each in chain)
            count = sum(size <= self._reader.most_nbytes // _SHARE for size in sizes)
            return self._reader.fetch_chain(chain[: max(1, count)], lambda: notify(self._changed))
        return self._reader.fetch_parts(chain[-1], lambda: notify(self._changed), self._parts)

    def _replace(self, version: int, error: Exception) -> ChainFetch | PartFetch | None:
        """Fetch the newest version that does not need an unreadable one, or raise the error."""
        chain: list[Manifest] = []
        head = None
        while not (chain or self._pinned):
            before = head
            # A newer version may have been published during the read.
            with suppress(SyncError):
                self._reader.look()
            head = self._reader.head
            if head is None or (before is not None and head.sequence <= before.sequence):
                break
            self._forget_others(head)
            chain = self._newest(head)
        if not chain:
            raise PayloadError(str(error)) from error
        _log.warning("version %d is read instead of %d: %s", chain[-1].version, version, error)
        self._next_look = 0.0
        return self._begin(chain)

    def _newest(self, head: Head) -> list[Manifest]:
        """Return the chain of the newest version that can be read."""
        for version in sorted(head.versions, reverse=True):
            if version <= self._seen:
                break
            try:
                chain = self._chain(version)
            except PayloadError:
                continue  # a base is gone or cannot be read
            # Readers of parts cannot use increments.
            if self._parts is None or not chain[-1].base:
                return chain
        return []

    def _chain(self, version: int) -> list[Manifest]:
        """Return a version's bases, the oldest first, and then the version itself."""
        chain = [self._manifest(version)]
        pieces = len(chain[0].objects)
        if self._parts is not None:
            return chain
        try:
            while self._needs_base(chain[-1]):
                base = chain[-1].base
                if base >= chain[-1].version:
                    raise PayloadError(
                        f"version {chain[-1].version} cannot build on version {base}"
                    )
                found = self._manifest(base)
                if found.digest != chain[-1].base_digest:
                    raise PayloadError(
                        f"version {chain[-1].version} builds on another version {base} than the "
                        "run has: the run went back, or a second trainer has written to it"
                    )
                chain.append(found)
                pieces += len(found.objects)
                if pieces > self._reader.most_pieces:
                    raise PayloadError(f"version {version} and its bases have {pieces} objects")
            if chain[1:] and not (chain[-1].base or chain[-1].anchor):
                raise PayloadError(
                    f"version {chain[-2].version} builds on version {chain[-1].version}, which is "
                    "not an anchor"
                )
        except PayloadError:
            self._broken.update(each.version for each in chain)
            raise
        return chain[::-1]

    def _needs_base(self, manifest: Manifest) -> bool:
        if not manifest.base:
            return False
        return self._increments is None or self._increments.needs(manifest)

    def _manifest(self, version: int) -> Manifest:
        if version in self._broken:
            raise PayloadError(f"version {version} cannot be read")
        found = self._manifests.get(version)
        if found is None:
            try:
                found = self._reader.manifest(version)
            except PayloadError:
                self._broken.add(version)
                raise
            if sum(len(each.objects) for each in self._manifests.values()) > (
                self._reader.most_pieces
            ):
                self._manifests.clear()
            self._manifests[version] = found
        return found

    def _finish(self, deadline: float) -> Payload | None:
        """Return the fetched version; None if no fetch ends in time."""
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
            # The next look finds another version.
            self._failure, self._next_look = (version, error), 0.0
            return None
        if version != self._target:
            # The increment reader keeps a copy.
            payload.release()
            self._next_look = 0.0
            return None
        self._seen = version
        return payload

    def _make(self, fetch: ChainFetch | PartFetch) -> Payload:
        """Return the payload of a whole version or of its parts."""
        if not isinstance(fetch, ChainFetch):
            block = fetch.result()
            return Payload.unpack(block, fetch.manifest.version, since=fetch.began)
        chain = [each.manifest for each in fetch.fetches]
        payloads = [
            self._reader.unpack(block, manifest.version, fetch.began)
            for manifest, block in zip(chain, fetch.result(), strict=True)
        ]
        if self._increments is None and any(each.anchor or each.base for each in chain):
            # Imported late, since it loads the increments of sync-plugin-scale.
            from sync_plugin_store.increments import IncrementReader

            self._increments = IncrementReader()
        if self._increments is not None:
            return self._increments.make(chain, payloads)
        return payloads[0]
