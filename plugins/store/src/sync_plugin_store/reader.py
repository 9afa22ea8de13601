"""The readers' side of a run: reads and checks the head, and fetches versions."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from sync_core import ClosedError, Layout, Payload
from sync_core.errors import PayloadError, SenderLostError
from sync_core.transports import Block
from sync_plugin_store.chunks import Chunk
from sync_plugin_store.errors import RolledBackError, SignatureError, StoreError
from sync_plugin_store.format import (
    HEAD,
    Head,
    Manifest,
    Piece,
    digest_of,
    manifest_name,
    object_name,
)
from sync_plugin_store.objects import MAX_HEADER_BYTES, NoRangesError, Objects, Patience

if TYPE_CHECKING:
    from sync_plugin_store.holdings import JoinedHoldings
    from sync_plugin_store.parts import PartFetch, Parts

__all__ = ["ChainFetch", "Fetch", "GoneError", "RunReader", "notify"]

_log = logging.getLogger("sync_core")
# How long a failed source is asked after the others, in seconds.
_AVOIDED = 10.0
# The memory for each byte of a header or list, which are JSON, and for each piece of a manifest, in
# bytes.
_FOR_JSON = 16
_FOR_PIECE = 256


class GoneError(PayloadError):
    """The run no longer keeps a version."""


class RunReader:
    """Reads one run, from one source or from several with the same objects.

    Only one thread may call the methods; the threads of its pool read objects.

    Args:
        sources: the stores to read from. Objects come from the first that has them, the head from
            each in turn. A failed source is asked last for a while.
        public: the public key of the run's trainer.
        run: the run's id; None to accept any run.
        timeout: how long failed requests are retried, in seconds.
        stale_after: how long a source may show an older head than before, as caches do, in seconds.
        streams: the number of concurrent reads.
        most_nbytes: the most memory that versions may take, in bytes; unlimited by default.
    """

    def __init__(
        self,
        sources: Sequence[Objects],
        public: str,
        run: str | None = None,
        *,
        most_nbytes: int = sys.maxsize,
        timeout: float = 60.0,
        stale_after: float = 300.0,
        streams: int = 8,
    ) -> None:
        self._sources = list(sources)
        self._public = public
        self.run = run
        self.most_nbytes = most_nbytes
        self.streams = streams
        self._timeout = timeout
        self._stale_after = stale_after
        self._turn = -1
        # By failed source: until when the others are asked first.
        self._avoided: dict[str, float] = {}
        # By source: the tag of the last head from it.
        self._tags: dict[str, str] = {}
        #: The newest head so far.
        self.head: Head | None = None
        #: The bytes of the newest head, with the signature.
        self.head_bytes = b""
        self._older_since: float | None = None
        self.stopped = threading.Event()
        # The last holdings that were read.
        self._holdings: tuple[Piece, bytes] | None = None
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="sync-store-get")

    @property
    def near(self) -> bool:
        """True if `look` is cheap, as in a directory."""
        return self._sources[0].near

    def look(self) -> Head | None:
        """Ask one source for the head; return the newest head so far.

        Returns:
            None before the first head.

        Raises:
            SignatureError: the head is signed with another key.
            SenderLostError: another run has replaced this one.
            RolledBackError: the source has shown an older head than before for too long.
            StoreError: no source answers.
        """
        failures: list[Exception] = []
        self._turn += 1
        turn = self._turn % len(self._sources)
        for source in self._in_order([*self._sources[turn:], *self._sources[:turn]]):
            try:
                found = source.look(HEAD, self._tags.get(source.url))
                if found is not None:
                    self._take(Head.from_bytes(found.data, self._public), source, found.data)
                    if self.head is not None and found.data == self.head_bytes:
                        # No tag for an older head: it is read again, to notice if it stays.
                        self._tags[source.url] = found.tag
            except (StoreError, SignatureError, PayloadError) as error:
                self._avoid(source)
                failures.append(error)
            else:
                return self.head
        raise failures[0]

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a version.

        Raises:
            GoneError: the version is not kept.
            PayloadError: no source has the right manifest.
        """
        digest = None if self.head is None else self.head.versions.get(version)
        if digest is None:
            kept = sorted(self.head.versions) if self.head is not None else []
            raise GoneError(
                f"version {version} is not in {self._sources[0].url}, which has {kept}; the "
                "trainer keeps more with keep=, and those that have names"
            )
        patience = Patience(self._timeout, self.stopped)
        reason = "it is not there"
        while True:
            for source in self._in_order(self._sources):
                try:
                    found = source.look(manifest_name(digest))
                except StoreError as error:
                    reason = str(error)
                    continue
                if found is not None and digest_of(found.data) == digest:
                    manifest = Manifest.from_bytes(found.data)
                    if (manifest.run, manifest.version) != (self.run, version):
                        raise PayloadError(f"the manifest of version {version} is another's")
                    return manifest
                if found is not None:
                    reason = "it has other bytes than its digest says"
            self._check_kept(version)
            if not patience.pause():
                raise PayloadError(
                    f"the manifest of version {version} cannot be read from "
                    f"{self._sources[0].url}: {reason}"
                )

    @property
    def most_pieces(self) -> int:
        """The most pieces that all manifests in memory may have together."""
        return self.most_nbytes // _FOR_PIECE

    def check_size(self, chain: Sequence[Manifest]) -> None:
        """Check how much memory versions need, before any is allocated.

        Args:
            chain: the version's bases, the oldest first, and then the version itself.

        Raises:
            PayloadError: a version, a list in it, or all manifests need too much memory.
        """
        pieces = 0
        for each in chain:
            listed = sum(file.pieces[0].nbytes for file in each.files)
            listed += sum(p.nbytes for p in each.objects) - each.nbytes
            pieces += len(each.objects)
            needed = max(each.nbytes, _FOR_JSON * listed, _FOR_PIECE * pieces)
            if needed > self.most_nbytes:
                raise PayloadError(
                    f"version {each.version} has {each.nbytes} bytes in {len(each.objects)} "
                    f"objects, which take {needed} bytes, and there is reason for "
                    f"{self.most_nbytes} at most"
                )

    def unpack(self, block: Block, version: int, since: float) -> Payload:
        """Return the payload of a version that has been read.

        Raises:
            PayloadError: the bytes are not a version, or the header needs too much memory.
        """
        length = int.from_bytes(block.memory[:8].numpy().tobytes(), "little")
        if _FOR_JSON * length > self.most_nbytes:
            raise PayloadError(f"version {version} has a header of {length} bytes")
        return Payload.unpack(block, version, since=since)

    def read_record(self, name: str, digest: str) -> bytes | None:
        """Return a small object from the first source that has it; None if no source has.

        Raises:
            StoreError: a source does not answer, and no other source has the object.
        """
        failure: StoreError | None = None
        for source in self._in_order(self._sources):
            try:
                found = source.look(name)
            except StoreError as error:
                failure = error
                continue
            if found is not None and digest_of(found.data) == digest:
                return found.data
        if failure is not None:
            raise failure
        return None

    def read_piece(self, piece: Piece, memory: memoryview, version: int) -> None:
        """Read an object into memory, from any source with the right bytes.

        Args:
            piece: the object.
            memory: memory of the object's size.
            version: the version that needs it.

        Raises:
            GoneError: the version is no longer kept.
            PayloadError: no source has the object.
        """
        self._read(piece, 0, memory, version, lambda: digest_of(memory) == piece.digest)

    def read_chunks(
        self, piece: Piece, start: int, memory: memoryview, chunks: Sequence[Chunk], version: int
    ) -> None:
        """Read consecutive chunks of an object into memory, as `read_piece` reads an object.

        Args:
            piece: the object with the chunks.
            start: the offset of the first chunk in the object.
            memory: memory of the chunks' size.
            chunks: the chunks.
            version: the version that needs them.

        Raises:
            GoneError: the version is no longer kept.
            PayloadError: no source has the chunks.
        """

        def right() -> bool:
            begin = 0
            for chunk in chunks:
                part = memory[begin : begin + chunk.nbytes]
                begin += chunk.nbytes
                if chunk.digest is None:
                    if digest_of(part) != piece.digest:
                        return False
                elif hashlib.sha256(part).digest() != chunk.digest:
                    return False
            return True

        self._read(piece, start, memory, version, right)

    def _read(
        self,
        piece: Piece,
        start: int,
        memory: memoryview,
        version: int,
        right: Callable[[], bool],
    ) -> None:
        patience = Patience(self._timeout, self.stopped)
        reason = "it is not there"
        name, whole = object_name(piece.digest), len(memory) == piece.nbytes
        while not self.stopped.is_set():
            without_ranges = 0
            for source in self._in_order(self._sources):
                try:
                    if not source.read(name, start, memory, patience, whole=whole):
                        reason = "it is not there"
                        continue
                except (PayloadError, StoreError) as error:
                    reason = str(error)
                    without_ranges += isinstance(error, NoRangesError) and not whole
                    if without_ranges == len(self._sources):
                        raise
                    self._avoid(source)
                    continue
                if right():
                    return
                reason = f"{source.url} has other bytes under its name"
                self._avoid(source)
            self._check_kept(version)
            if not patience.pause():
                break
        raise PayloadError(
            f"object {piece.digest[:12]}… of version {version} cannot be read: {reason}; the "
            "trainer's next version, or another mirror, can"
        )

    def fetch(self, manifest: Manifest, notify: Callable[[], object]) -> Fetch:
        """Start fetching a version; see `Fetch`."""
        return Fetch(self, self._pool, manifest, notify)

    def fetch_chain(self, chain: Sequence[Manifest], notify: Callable[[], object]) -> ChainFetch:
        """Start fetching a version and its bases; see `ChainFetch`."""
        return ChainFetch([self.fetch(each, notify) for each in chain])

    def holdings(self, manifest: Manifest) -> JoinedHoldings:
        """Return the parts of a version that each rank has written.

        Raises:
            PayloadError: the parts cannot be read or do not make up whole tensors.
        """
        # Imported late, since it loads the shards of sync-plugin-scale.
        from sync_plugin_store.holdings import JoinedHoldings

        piece = manifest.holdings
        assert piece is not None
        if self._holdings is None or self._holdings[0] != piece:
            data = bytearray(piece.nbytes)
            self.read_piece(piece, memoryview(data), manifest.version)
            # All versions of a trainer have the same holdings.
            self._holdings = piece, bytes(data)
        joined = JoinedHoldings.from_bytes(self._holdings[1])
        if len(joined.ranks) != len(manifest.ranks):
            raise PayloadError(
                f"version {manifest.version} has parts of {len(manifest.ranks)} ranks, and a list "
                f"of those of {len(joined.ranks)}"
            )
        return joined

    def layout(self, version: int, timeout: float) -> Layout:
        """Return the layout of a whole version.

        Args:
            version: the version; 0 for the newest, which may not exist yet.
            timeout: how long to wait for the first version, in seconds.

        Raises:
            StoreError: the run has no version.
            PayloadError: the version cannot be read.
        """
        patience = Patience(timeout, self.stopped)
        while (head := self.look()) is None or not head.version:
            if not patience.pause():
                raise StoreError(
                    f"{self._sources[0].url} has no version after {timeout:g} s, from which to "
                    "learn what its ranks hold; make the Receiver once the ranks have called "
                    "send(), or give it a longer timeout="
                )
        manifest = self.manifest(version or head.version)
        if manifest.ranks:
            return self.holdings(manifest).layout
        while 0 < manifest.base < manifest.version:
            manifest = self.manifest(manifest.base)
        first = manifest.pieces[0]
        if first.nbytes > MAX_HEADER_BYTES:
            raise PayloadError(f"version {manifest.version} has a header of {first.nbytes} bytes")
        header = bytearray(first.nbytes)
        self.read_piece(first, memoryview(header), manifest.version)
        return Layout.from_header(bytes(header)).plain

    def fetch_parts(
        self, manifest: Manifest, notify: Callable[[], object], parts: Parts | None
    ) -> PartFetch:
        """Start fetching parts of a version; see `PartFetch`."""
        # Imported late, since it loads the shards of sync-plugin-scale.
        from sync_plugin_store.parts import PartFetch

        return PartFetch(self, self._pool, manifest, notify, parts)

    def check_open(self) -> None:
        """Raise `ClosedError` once the reader is closed."""
        if self.stopped.is_set():
            raise ClosedError("the receiver is closed")

    def close(self) -> None:
        """Cancel all fetches."""
        self.stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for source in self._sources:
            source.close()

    def _take(self, head: Head, source: Objects, data: bytes) -> None:
        """Check the signature of a head, and adopt the head if it is newer."""
        if self.run is None:
            self.run = head.run
        if head.run != self.run:
            raise SenderLostError(
                f"{source.url} has another run now; a trainer that continues one "
                "needs its key: Sender(…, key='FILE')"
            )
        if self.head is None or head.sequence >= self.head.sequence:
            self.head, self.head_bytes, self._older_since = head, data, None
            return
        now = time.monotonic()
        if self._older_since is None:
            self._older_since = now
            _log.warning(
                "%s has an older head, %d, than %d, which was seen before; version %d stays",
                source.url,
                head.sequence,
                self.head.sequence,
                self.head.version,
            )
        elif now - self._older_since > self._stale_after:
            raise RolledBackError(
                f"{source.url} has had an older head, of version {head.version}, "
                f"for {now - self._older_since:.0f} s, after one of version {self.head.version}; "
                "the run was restored from a copy, or something writes to it that must not"
            )

    def _check_kept(self, version: int) -> None:
        """Raise `GoneError` if the trainer no longer keeps a version."""
        for source in self._in_order(self._sources):
            try:
                found = source.look(HEAD)
                head = None if found is None else Head.from_bytes(found.data, self._public)
            except (StoreError, SignatureError, PayloadError):
                continue  # `look` reports it
            newest = 0 if self.head is None else self.head.sequence
            if head is None or head.run != self.run or head.sequence <= newest:
                continue
            if version not in head.versions:
                raise GoneError(f"version {version} is not kept any longer; a newer one is")

    def _avoid(self, source: Objects) -> None:
        """Ask a failed source after the others for some seconds."""
        self._avoided[source.url] = time.monotonic() + _AVOIDED

    def _in_order(self, sources: Sequence[Objects]) -> list[Objects]:
        """Return sources, recently failed ones last."""
        now = time.monotonic()
        return sorted(sources, key=lambda source: self._avoided.get(source.url, 0.0) > now)


class Fetch:
    """Reads a version into memory, in the background.

    Args:
        reader: the reader of the run.
        pool: the threads that read objects.
        manifest: the version.
        notify: called by other threads when all objects have arrived or one has failed.
    """

    def __init__(
        self,
        reader: RunReader,
        pool: ThreadPoolExecutor,
        manifest: Manifest,
        notify: Callable[[], object],
    ) -> None:
        self.manifest = manifest
        self._reader = reader
        self.block = Block.allocate(manifest.nbytes)
        self.began = time.perf_counter()
        self._pieces = self._parts()
        # Guards the pieces that no thread has taken yet.
        self._lock = threading.Lock()
        self._cancelled = False
        self._reading: list[Future[None]] = []
        # One task per stream, not per piece, since there may be very many pieces.
        for _ in range(min(reader.streams, len(manifest.pieces))):
            future = pool.submit(self._read)
            future.add_done_callback(lambda _: notify())
            self._reading.append(future)

    def _parts(self) -> Iterator[tuple[Piece, memoryview]]:
        memory, begin = self.block.memory.numpy().data, 0
        for piece in self.manifest.pieces:
            yield piece, memory[begin : begin + piece.nbytes]
            begin += piece.nbytes

    def _read(self) -> None:
        while not self._cancelled:
            with self._lock:
                piece, part = next(self._pieces, (None, None))
            if piece is None or part is None:
                return
            try:
                self._reader.read_piece(piece, part, self.manifest.version)
            except BaseException:
                self._cancelled = True
                raise

    @property
    def ended(self) -> bool:
        """True once every object has arrived or one has failed."""
        return all(f.done() for f in self._reading) or self._failure is not None

    def result(self) -> Block:
        """Return the version, all bytes checked.

        Raises:
            PayloadError: an object could not be read.
            ClosedError: the reader was closed before all objects were read.
        """
        self._reader.check_open()
        failure = self._failure
        if failure is not None:
            self.cancel()
            raise failure
        return self.block

    def cancel(self) -> None:
        """Start no further reads."""
        self._cancelled = True
        for future in self._reading:
            future.cancel()

    @property
    def failed(self) -> bool:
        """True once reading an object has failed."""
        return self._failure is not None

    @property
    def _failure(self) -> BaseException | None:
        done = (f for f in self._reading if f.done() and not f.cancelled())
        return next((e for f in done if (e := f.exception()) is not None), None)


class ChainFetch:
    """Fetches a version and all versions that it builds on, the oldest first.

    Args:
        fetches: the fetch of each version.
    """

    def __init__(self, fetches: Sequence[Fetch]) -> None:
        self.fetches = fetches
        self.began = fetches[0].began

    @property
    def manifest(self) -> Manifest:
        """The version."""
        return self.fetches[-1].manifest

    @property
    def ended(self) -> bool:
        """True once all versions have arrived or one has failed."""
        return all(f.ended for f in self.fetches) or any(f.failed for f in self.fetches)

    def result(self) -> list[Block]:
        """Return the blocks of all versions, all bytes checked.

        Raises:
            PayloadError: an object could not be read.
        """
        failed = next((fetch for fetch in self.fetches if fetch.failed), None)
        for other in self.fetches if failed is not None else ():
            other.cancel()
        return [fetch.result() for fetch in ([failed] if failed is not None else self.fetches)]

    @property
    def broken(self) -> int:
        """The version whose fetch has failed; 0 for none."""
        return next((fetch.manifest.version for fetch in self.fetches if fetch.failed), 0)


def notify(changed: threading.Condition) -> None:
    """Wake all threads that wait for a condition."""
    with changed:
        changed.notify_all()
