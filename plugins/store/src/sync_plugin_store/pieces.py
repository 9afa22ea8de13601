"""Write versions as objects that are named by their content: `PieceWriter`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from sync_core import Payload
from sync_plugin_std.stores import parts_of
from sync_plugin_store.chunks import cuts_of, digests_between, write_chunks
from sync_plugin_store.errors import StoreError
from sync_plugin_store.format import File, Manifest, Piece, digest_of, manifest_name, object_name
from sync_plugin_store.objects import Objects

__all__ = ["PieceWriter", "pieces_of"]

_log = logging.getLogger("sync_core")
# Smaller bodies are not cut into chunks, since even readers of a part read them whole, in bytes.
_SMALL = 1 << 20


class PieceWriter:
    """Writes versions in pieces, several of them concurrently.

    Args:
        objects: the store to write to.
        piece_nbytes: the size of a piece, in bytes.
        streams: the number of concurrent writes.
        chunks: whether readers can check parts of a version.
    """

    def __init__(self, objects: Objects, *, piece_nbytes: int, streams: int, chunks: bool) -> None:
        self._objects = objects
        self._piece_nbytes = piece_nbytes
        self._chunks = chunks
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="sync-store-put")
        self._most = 2 * streams
        # Objects written since the last `take_written`; several threads add to it.
        self._written: list[Piece] = []

    def write(self, payload: Payload, known: Collection[str], *, divided: bool = True) -> File:
        """Write those objects of a version that are not in the store yet.

        Args:
            payload: the version; its tensors may change once this returns.
            known: the digests of objects that are in the store.
            divided: whether readers can read parts of the version.

        Raises:
            StoreError: the store failed.
        """
        cuts: tuple[int, ...] = ()
        if self._chunks and divided and payload.layout.body_nbytes > _SMALL:
            cuts = cuts_of(payload.layout)
        found = self._write_pieces(payload, known, cuts)
        pieces = tuple(piece for piece, _ in found)
        if not cuts:
            return File(pieces)
        listed = write_chunks([chunk for _, chunks in found for chunk in chunks])
        return File(pieces, self.write_object(listed, known))

    def write_object(
        self, data: bytes | memoryview, known: Collection[str] = (), piece: Piece | None = None
    ) -> Piece:
        """Write one object, unless it is known to exist; ``piece`` is its name, if known."""
        piece = piece or Piece(digest_of(data), len(data))
        if piece.digest not in known:
            self._written.append(piece)
            self._objects.put(object_name(piece.digest), data)
        return piece

    def take_written(self, but: Collection[Piece] = ()) -> list[Piece]:
        """Return the objects written, even in part, since the last call, except ``but``."""
        written, self._written = self._written, []
        known = set(but)
        return [piece for piece in written if piece not in known]

    def name(self, run: str, version: int, pieces: Collection[Piece]) -> None:
        """Write a manifest for objects of no version, so that they can be removed as the run's own.

        Args:
            run: the run's id.
            version: the version for which the objects were written.
            pieces: the objects.
        """
        if not pieces:
            return
        data = Manifest(run=run, version=version, pieces=tuple(pieces)).to_bytes()
        try:
            self._objects.put(manifest_name(digest_of(data)), data)
        except StoreError as error:
            _log.warning("parts of version %d stay in %s: %s", version, self._objects.url, error)

    def close(self) -> None:
        """Wait for pending writes, and end the threads."""
        self._pool.shutdown(wait=True)

    def _write_pieces(
        self, payload: Payload, known: Collection[str], cuts: Sequence[int]
    ) -> list[tuple[Piece, list[tuple[int, bytes]]]]:
        """Return each piece with its chunks."""
        writing: list[Future[tuple[Piece, list[tuple[int, bytes]]]]] = []
        failed = threading.Event()
        # A semaphore for each call, since Ctrl-C may come after a place was taken and before it is
        # used.
        places = threading.BoundedSemaphore(self._most)
        # The offset of the next piece in the body; the header lies before the body.
        start = -len(payload.layout.header)

        def write(data: bytes | memoryview, start: int) -> tuple[Piece, list[tuple[int, bytes]]]:
            try:
                piece = Piece(digest_of(data), len(data))
                if not failed.is_set():
                    self.write_object(data, known, piece)
                return piece, digests_between(data, start, cuts) if cuts and start >= 0 else []
            except BaseException:
                failed.set()
                raise
            finally:
                places.release()

        try:
            for data in pieces_of(payload, self._piece_nbytes):
                places.acquire()
                if failed.is_set():
                    places.release()
                    break
                writing.append(self._pool.submit(write, data, start))
                start += len(data)
        except BaseException:
            failed.set()
            raise
        finally:
            # Wait for all writes, since the trainer changes its tensors after this.
            errors = [future.exception() for future in writing]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in writing]


def pieces_of(payload: Payload, nbytes: int) -> Iterator[bytes | memoryview]:
    """Split the bytes of a version: first the header, then the body in pieces of equal size.

    Args:
        payload: the version.
        nbytes: the size of a piece, in bytes; the last one is smaller.

    Example:
        >>> import torch
        >>> from sync_core import Layout
        >>> weights = {"bias": torch.ones(100)}
        >>> payload = Payload(1, Layout.of(weights), tuple(weights.values()))
        >>> pieces = list(pieces_of(payload, 256))
        >>> bytes(pieces[0]) == payload.layout.header, [len(piece) for piece in pieces[1:]]
        (True, [256, 144])
        >>> b"".join(pieces) == payload.to_bytes()
        True
    """
    room, gathered = len(payload.layout.header), list[memoryview]()
    for part in parts_of(payload):
        rest = part.cast("B") if part.nbytes else memoryview(b"")
        while rest:
            taken, rest = rest[:room], rest[room:]
            gathered.append(taken)
            room -= len(taken)
            if not room:
                yield _joined(gathered)
                room, gathered = nbytes, []
    if gathered:
        yield _joined(gathered)


def _joined(parts: list[memoryview]) -> bytes | memoryview:
    return parts[0] if len(parts) == 1 else b"".join(parts)
