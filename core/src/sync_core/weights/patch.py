"""Patches: the positions of a packed body that changed since a version, and today's values there.

A body, padded to a multiple of 64 bytes, is looked at as one row of unsigned integers, the units,
whose size is that of most of the model's elements. Bits are compared, so NaN equals itself and
-0.0 differs from 0.0. A patch holds values and no differences, so to apply it twice changes
nothing, and it applies to every version from its base on.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sync_core.errors import OptionError, PayloadError
from sync_core.weights.block import Block
from sync_core.weights.copying import copy
from sync_core.weights.layout import ALIGNMENT, Layout
from sync_core.weights.payload import Payload

#: A row of units: an array of uint8, uint16, uint32 or uint64.
Units: TypeAlias = NDArray[Any]
#: How patches are compressed.
Compression: TypeAlias = Literal["zstd"]

# Of units: no machine has the memory for so many.
_TOO_LARGE = 1 << 48
# Compared at a time, in bytes: the pieces of both sides fit into a core's cache.
_PIECE = 1 << 18
# Small tensors are packed together, up to so many bytes, before they are compared.
_GROUP = 1 << 20
_MAGIC = b"SCP1"
# The magic, the sizes of a unit and a gap, whether it is compressed, whether there is a checksum;
# base, version, positions, units of the body, checksum, bytes of values and of gaps; the digest.
_HEADER = struct.Struct("<4sBBBBQQQQQQQ32s")
#: The size of a patch without positions, in bytes.
HEADER_NBYTES = _HEADER.size
# Where one word in so many differs, comparing units alone is faster.
_DENSE = 8
# zstd's fastest: 3 to 15 ms for a patch of 257 MiB, and hardly larger than with higher levels.
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Patch:
    """Turns the packed body of any version from ``base`` on into that of ``version``.

    Args:
        base: the oldest version that it applies to; 0 for a whole version, which it describes.
        version: the version that results.
        digest: of the layout of both.
        checksum: XXH3 of the body that results; None where the hash library is missing.
        size: the units of the body.
        gaps: from each position to the next, in units of 1 or 2 bytes. A longer gap is bridged by
            positions that did not change.
        values: of the units at these positions, today.

    Example:
        >>> body = np.zeros(64, np.uint16)
        >>> body[[3, 9]] = 7
        >>> gaps = shorten(np.array([3, 9]), unit=2)
        >>> patch = Patch(1, 2, "0" * 64, checksum(body), 64, gaps, body[[3, 9]])
        >>> other = np.zeros(64, np.uint16)
        >>> Patch.from_tensor(patch.to_tensor()).apply(other)
        >>> other.nonzero()
        (array([3, 9]),)
    """

    base: int
    version: int
    digest: str
    checksum: int | None
    size: int
    gaps: Units
    values: Units

    @property
    def nbytes(self) -> int:
        """Size in bytes when it travels and is not compressed."""
        return HEADER_NBYTES + self.values.nbytes + self.gaps.nbytes

    def apply(self, body: Units) -> None:
        """Write the values into a body of any version from ``base`` on.

        Raises:
            PayloadError: the body has another size, or a position is outside of it, and nothing
                was written; or the result has another checksum, and is worthless.
        """
        self.check_fits(body)
        positions = positions_of(self.gaps)
        if len(positions) and positions[-1] >= len(body):
            raise PayloadError(f"a patch has position {positions[-1]}, the body {len(body)} units")
        body[positions] = self.values
        self.check_result(body)

    def check_fits(self, body: Units) -> None:
        """Raise `PayloadError` unless a body has the size and the units of this patch."""
        if (len(body), body.dtype) != (self.size, self.values.dtype):
            raise PayloadError(
                f"a patch is for a body of {self.size} {self.values.dtype}, this one has "
                f"{len(body)} {body.dtype}"
            )

    def results_in(self, body: Units) -> bool:
        """Return whether a body has the checksum of the result, as far as can be known."""
        found = None if self.checksum is None else checksum(body)
        return found in (None, self.checksum)

    def check_result(self, body: Units) -> None:
        """Raise `PayloadError` where a body has another checksum than the result."""
        if not self.results_in(body):
            raise PayloadError(
                f"version {self.version} has the checksum {checksum(body) or 0:016x} here and "
                f"{self.checksum or 0:016x} at the sender"
            )

    def to_tensor(self, compress: Compression | None = None) -> Tensor:
        """Return the patch as the tensor of bytes in which it travels."""
        values, gaps = self.values.tobytes(), self.gaps.tobytes()
        if compress is not None:
            compressor = zstd().ZstdCompressor(level=_LEVEL)
            values, gaps = compressor.compress(values), compressor.compress(gaps)
        header = _HEADER.pack(
            _MAGIC,
            self.values.itemsize,
            self.gaps.itemsize,
            compress is not None,
            self.checksum is not None,
            self.base,
            self.version,
            len(self.gaps),
            self.size,
            self.checksum or 0,
            len(values),
            len(gaps),
            bytes.fromhex(self.digest),
        )
        return torch.frombuffer(bytearray(header + values + gaps), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Patch:
        """Return the patch that `to_tensor` made; it may be a view of the tensor.

        Raises:
            PayloadError: the bytes are not a patch.
        """
        data = tensor.cpu().contiguous().numpy()
        try:
            magic, unit, gap, packed, summed, *numbers, digest = _HEADER.unpack_from(
                data[:HEADER_NBYTES].tobytes()
            )
            base, version, count, size, checksum_, values_nbytes, gaps_nbytes = numbers
            end = HEADER_NBYTES + values_nbytes
            values, gaps = data[HEADER_NBYTES:end], data[end : end + gaps_nbytes]
            if magic != _MAGIC or unit not in (1, 2, 4, 8) or gap not in (1, 2):
                raise ValueError("it does not begin as one")
            if not count <= size < _TOO_LARGE:
                raise ValueError(f"it has {count} positions in {size} units")
            if packed:
                values, gaps = _expand(values, count * unit), _expand(gaps, count * gap)
            if (len(values), len(gaps)) != (count * unit, count * gap):
                raise ValueError("it is not as long as it says")
        except (ValueError, struct.error) as error:
            raise PayloadError(f"not a patch: {error}") from error
        return cls(
            base,
            version,
            digest.hex(),
            checksum_ if summed else None,
            size,
            gaps.view(f"u{gap}"),
            values.view(f"u{unit}"),
        )


def units_of(block: Block, layout: Layout) -> Units:
    """Return the body of a layout in a block, as units; the block must have room for the padding.

    Example:
        >>> layout = Layout.of({"weight": torch.ones(3, dtype=torch.bfloat16)})
        >>> len(units_of(Block.allocate(padded_nbytes(layout)), layout))
        32
    """
    start = len(layout.header)
    body = block.memory[start : padded_nbytes(layout)].numpy()
    return body.view(f"u{unit_nbytes(layout)}")


def padded_nbytes(layout: Layout) -> int:
    """Return the size of a block for `units_of`, in bytes."""
    return len(layout.header) + layout.body_nbytes + -layout.body_nbytes % ALIGNMENT


@lru_cache(maxsize=64)
def unit_nbytes(layout: Layout) -> int:
    """Return the size of a unit: that of the elements that most bytes of a layout belong to."""
    sizes = Counter[int]()
    for spec in layout.specs:
        sizes[min(8, spec.dtype.itemsize)] += spec.nbytes
    return max(sizes, key=lambda size: (sizes[size], size), default=1)


@dataclass(frozen=True, slots=True)
class Difference:
    """The positions at which a payload differs from a body, and its values there."""

    positions: NDArray[np.int64]
    values: Units


class Comparer:
    """Finds where payloads of one layout differ from a packed body.

    Large tensors in the memory of the host are compared where they lie; small ones are packed into
    a megabyte of scratch memory together, and those of a GPU pass through it.

    Args:
        layout: the layout.
    """

    def __init__(self, layout: Layout) -> None:
        self._unit = unit_nbytes(layout)
        self._groups = list(_groups(layout))
        sizes = (padded_nbytes(group.layout) for group in self._groups if not group.large)
        scratch = Block.allocate(max(sizes, default=0))
        self._blocks = [Block(scratch.memory) for _ in self._groups]

    def compare(self, body: Units, payload: Payload, limit: int) -> Difference | None:
        """Return where a payload differs from a body; None where it does in too many places.

        Args:
            body: of an earlier version, see `units_of`; it is only read.
            payload: a version of the same layout.
            limit: how many positions are too many.
        """
        found = [(np.empty(0, np.int64), np.empty(0, body.dtype))]
        count = 0
        with payload.packing:
            for start, new in self._pieces(payload):
                old = body[start : start + len(new)]
                positions = differing(old, new)
                if not len(positions):
                    continue
                count += len(positions)
                if count > limit:
                    return None
                found.append((positions + start, new[positions]))
        return Difference(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _pieces(self, payload: Payload) -> Iterator[tuple[int, Units]]:
        """Each piece of a payload's body, with the unit at which it begins.

        Its bytes are good until the next one.
        """
        for offset, data in self._stretches(payload):
            for begin in range(0, len(data), _PIECE):
                piece = data[begin : begin + _PIECE]
                if len(piece) % ALIGNMENT:
                    piece = np.concatenate([piece, np.zeros(-len(piece) % ALIGNMENT, np.uint8)])
                yield (offset + begin) // self._unit, piece.view(f"u{self._unit}")

    def _stretches(self, payload: Payload) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The bytes of a payload's body in their order, each stretch with its offset."""
        tensors = payload.tensors
        for group, block in zip(self._groups, self._blocks, strict=True):
            some = tensors[group.first : group.last]
            if group.large:
                yield from _large(some[0], group.offset)
            else:
                body = units_of(block, group.layout)
                body.fill(0)
                copy(block.views(group.layout), some)
                yield group.offset, body.view(np.uint8)


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbours that are packed together: their positions, their place, and a layout of them."""

    first: int
    last: int
    offset: int
    layout: Layout

    @property
    def large(self) -> bool:
        return self.layout.body_nbytes > _GROUP


def _groups(layout: Layout) -> Iterator[_Group]:
    specs, first = layout.specs, 0
    for last in range(1, len(specs) + 1):
        begin = specs[first].offset
        if last < len(specs) and specs[last].offset + specs[last].nbytes - begin <= _GROUP:
            continue
        some = tuple(replace(spec, offset=spec.offset - begin) for spec in specs[first:last])
        yield _Group(first, last, begin, Layout(some))
        first = last


def _large(tensor: Tensor, offset: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The bytes of one large tensor, which begins at an offset."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if _is_direct(flat):
        yield offset, flat.view(torch.uint8).numpy()
        return
    for part in flat.split(_GROUP // flat.element_size()):
        yield offset, part.to("cpu", copy=True).view(torch.uint8).numpy()
        offset += part.nbytes


def _is_direct(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor can be read as words where they lie."""
    return tensor.device.type == "cpu" and tensor.data_ptr() % 8 == 0


def differing(old: Units, new: Units) -> NDArray[np.int64]:
    """Return the positions at which two rows of the same length differ.

    Most are equal, so words of eight bytes are compared first.
    """
    each = 8 // old.itemsize
    if each > 1 and len(old) % each == 0:
        before, after = old.view(np.uint64), new.view(np.uint64)
        words = np.flatnonzero(before != after)
        if len(words) * _DENSE < len(before):
            # Units that are equal in both are 0 here.
            units = (before[words] ^ after[words]).view(old.dtype)
            found = np.flatnonzero(units)
            return words[found // each] * each + found % each
    return np.flatnonzero(old != new)


def shorten(positions: NDArray[np.int64], unit: int) -> Units:
    """Return the gaps between positions, in one or two bytes each, whichever takes less.

    Args:
        positions: ascending, each once.
        unit: the bytes of a value, which each bridge of a long gap costs as well.

    Example:
        >>> shorten(np.array([2, 5, 300]), unit=1)
        array([  2,   3, 255,  40], dtype=uint8)
    """
    gaps = np.diff(positions, prepend=0)
    # The few long gaps, and how many bridges each of them needs.
    where = {width: np.flatnonzero(gaps > limit) for width, limit in _LONGEST.items()}
    bridges = {width: (gaps[where[width]] - 1) // limit for width, limit in _LONGEST.items()}
    width = min(
        _LONGEST, key=lambda width: (width + unit) * (len(gaps) + int(bridges[width].sum()))
    )
    gaps[where[width]] -= bridges[width] * _LONGEST[width]
    before = np.repeat(where[width], bridges[width])
    return np.insert(gaps.astype(f"u{width}"), before, _LONGEST[width])


_LONGEST = {1: (1 << 8) - 1, 2: (1 << 16) - 1}


def positions_of(gaps: Units) -> NDArray[np.int64]:
    """Return the positions that `shorten` was given, and those that bridge long gaps."""
    return np.cumsum(gaps, dtype=np.int64)


def checksum(body: Units) -> int | None:
    """Return XXH3 of a body; None where the hash library is not installed."""
    try:
        import xxhash
    except ImportError:
        return None
    data: Any = body.view(np.uint8)
    return xxhash.xxh3_64_intdigest(data)


def zstd() -> Any:
    """Return the module that compresses.

    Raises:
        OptionError: it is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise OptionError(
            "compress='zstd' needs the library zstandard, here and in the workers: "
            'pip install "sync-core[zstd]"'
        ) from error
    return zstandard


def _expand(data: Units, nbytes: int) -> Units:
    library, packed = zstd(), data.tobytes()
    try:
        if library.frame_content_size(packed) != nbytes:
            raise ValueError("it does not expand to what it says")
        text = library.ZstdDecompressor().decompress(packed)
    except library.ZstdError as error:
        raise ValueError(str(error)) from error
    return np.frombuffer(text, np.uint8)
