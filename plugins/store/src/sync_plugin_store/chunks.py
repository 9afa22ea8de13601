"""The chunks of a version: the smallest parts that have a digest of their own.

For readers of shards, the trainer splits each tensor into chunks of equal numbers of rows, so that
the shards of 2, 4, … 64 ranks begin and end at chunk boundaries. It writes the sizes and digests of
all chunks into one object.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

from sync_core import Layout
from sync_core.errors import PayloadError
from sync_plugin_store.format import File, Manifest, Piece

__all__ = ["Chunk", "Chunks", "cuts_of", "digests_between", "read_chunks", "write_chunks"]

# The number of chunks in a tensor, unless they would be too small. Common rank counts divide it.
_PARTS = 64
# Sizes of a chunk, in bytes. Its entry of 40 bytes is 1 % of the least; the greatest limits the
# unneeded bytes that are read if a shard ends within a chunk.
_LEAST, _MOST = 4096, 256 << 10
_ENTRY = struct.Struct("<Q32s")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a version's body.

    Args:
        start: its first byte, counted from the start of the body.
        nbytes: its size.
        digest: its SHA-256; None if the chunk is a whole piece, whose name is its digest.
        piece: the position of its object among the version's pieces.
    """

    start: int
    nbytes: int
    digest: bytes | None
    piece: int


class Chunks:
    """The chunks of a version in order.

    Args:
        chunks: all chunks.
        pieces: the version's objects; the first is its header.
    """

    def __init__(self, chunks: Sequence[Chunk], pieces: Sequence[Piece]) -> None:
        self.chunks = chunks
        self.pieces = pieces
        self._starts = [chunk.start for chunk in chunks]
        #: The offset in the body at which each piece begins, and at which the last one ends.
        self.begins = [*accumulate((p.nbytes for p in pieces[1:]), initial=0)]

    def between(self, start: int, stop: int) -> range:
        """Return the indices of the chunks that overlap a range of the body."""
        return range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop))


@lru_cache(maxsize=8)
def cuts_of(layout: Layout) -> tuple[int, ...]:
    """Return the offsets at which chunks begin in the body of versions with a layout.

    Example:
        >>> import torch
        >>> cuts = cuts_of(Layout.of({"bias": torch.zeros(8), "weight": torch.zeros(1024, 64)}))
        >>> len(cuts), cuts[:4]
        (65, (0, 64, 4160, 8256))
    """
    cuts = {0}
    for spec in layout.specs:
        parts = 1
        while parts < _PARTS and spec.nbytes // (2 * parts) >= _LEAST:
            parts *= 2
        while spec.nbytes // parts > _MOST:
            parts *= 2
        rows = prod(spec.shape[:-1]) if len(spec.shape) > 1 else 0
        if rows < parts:
            rows = max(1, spec.nbytes // spec.dtype.itemsize)
        step = -(-rows // parts) * (spec.nbytes // rows)
        cuts.update(range(spec.offset, spec.offset + spec.nbytes, max(1, step)))
    return tuple(sorted(cuts))


def digests_between(
    data: bytes | memoryview, start: int, cuts: Sequence[int]
) -> list[tuple[int, bytes]]:
    """Return the sizes and digests of the chunks in a piece that begins at a chunk boundary.

    Args:
        data: the piece.
        start: its first byte, counted from the start of the body.
        cuts: see `cuts_of`.
    """
    stop = start + len(data)
    inner = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)]
    view = memoryview(data)
    return [
        (last - first, hashlib.sha256(view[first - start : last - start]).digest())
        for first, last in pairwise((start, *inner, stop))
    ]


def write_chunks(entries: Sequence[tuple[int, bytes]]) -> bytes:
    """Encode the sizes and digests of a version's chunks, in order, as one object.

    Example:
        >>> len(write_chunks([(4096, bytes(32)), (64, bytes(32))]))
        80
    """
    return b"".join(_ENTRY.pack(nbytes, digest) for nbytes, digest in entries)


def read_chunks(data: bytes | memoryview | None, file: File | Manifest) -> Chunks:
    """Decode the chunks of a version.

    Args:
        data: the result of `write_chunks`; None if the trainer wrote no chunks, so that each piece
            is one chunk.
        file: the version, or the file of one of its ranks.

    Raises:
        PayloadError: the chunks do not match the version's pieces.
    """
    chunks, begin = [], 0
    if data is None:
        for number, piece in enumerate(file.pieces[1:], 1):
            chunks.append(Chunk(begin, piece.nbytes, None, number))
            begin += piece.nbytes
        return Chunks(chunks, file.pieces)
    if len(data) % _ENTRY.size:
        raise PayloadError(f"a list of chunks has {len(data)} bytes")
    entries = _ENTRY.iter_unpack(data)
    for number, piece in enumerate(file.pieces[1:], 1):
        left = piece.nbytes
        while left:
            nbytes, digest = next(entries, (0, b""))
            if not 0 < nbytes <= left:
                raise PayloadError(f"a list of chunks does not fit piece {number} of its version")
            chunks.append(Chunk(begin, nbytes, digest, number))
            begin, left = begin + nbytes, left - nbytes
    if next(entries, None) is not None:
        raise PayloadError("a list of chunks has more of them than its version")
    return Chunks(chunks, file.pieces)
