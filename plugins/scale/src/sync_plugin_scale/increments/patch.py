"""Patches: the positions of a packed body that changed since a version, and today's values there.

A body, padded to a multiple of 64 bytes, is looked at as one row of unsigned integers, the units,
whose size is that of most of the model's elements. A patch holds values and no differences, so to
apply it twice changes nothing, and it applies to every version from its base on. `compare` finds
what changed.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sync_core import Layout, OptionError, Payload, TensorSpec
from sync_core.errors import PayloadError, RequirementError
from sync_core.transports import ALIGNMENT, RESERVED_PREFIX, Block, in_two_threads

#: A row of units: an array of uint8, uint16, uint32 or uint64.
Units: TypeAlias = NDArray[Any]
#: How patches are compressed.
Compression: TypeAlias = Literal["zstd"]

#: The name of the tensor that holds an increment, or describes a whole version.
INCREMENT = RESERVED_PREFIX + "increment"
# Of units: no machine has the memory for so many.
_TOO_LARGE = 1 << 48
# A checksum is that of the checksums of so many bytes each, which two threads share.
_SUMMED = 1 << 20
_MAGIC = b"SCP2"
# The magic; the sizes of a unit and a gap, flags; base, version, positions, gaps, units of the
# body, checksum, bytes of values and of gaps; the digest.
_HEADER = struct.Struct("<4sBBBxQQQQQQQQ32s")
#: The size of a patch without positions, in bytes.
HEADER_NBYTES = _HEADER.size
_COMPRESSED = 1
# The hashes of checksums: XXH3 is 7 times as fast, and has to be installed.
_XXH3, _SHA256 = 2, 4
# zstd's fastest: 3 to 15 ms for a patch of 257 MiB, and hardly larger than with higher levels.
_LEVEL = 1


class BodyChecksum(NamedTuple):
    """A checksum of a body.

    Args:
        hashed_by: the hash.
        value: the checksum.
    """

    hashed_by: int
    value: int


@dataclass(frozen=True, slots=True)
class Patch:
    """Turns the packed body of any version from ``base`` on into that of ``version``.

    Args:
        base: the oldest version that it applies to; 0 for a whole version, which it describes.
        version: the version that results.
        digest: of the layout of both.
        checksum: of the body that results; None where the result is proven by other means.
        size: the units of the body.
        gaps: from each position to the next; see `shorten`.
        values: of the units at these positions, today.

    Example:
        >>> body = np.zeros(64, np.uint16)
        >>> body[[3, 9]] = 7
        >>> gaps = shorten(np.array([3, 6]))
        >>> patch = Patch(1, 2, "0" * 64, checksum(body), 64, gaps, body[[3, 9]])
        >>> other = np.zeros(64, np.uint16)
        >>> Patch.from_tensor(patch.to_tensor()).apply(other)
        >>> other.nonzero()
        (array([3, 9]),)
    """

    base: int
    version: int
    digest: str
    checksum: BodyChecksum | None
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
        count = int(np.count_nonzero(self.gaps != _SKIP[self.gaps.itemsize]))
        last = int(self.gaps.sum(dtype=np.int64))
        if count != len(self.values):
            raise PayloadError(f"a patch has {count} positions, and {len(self.values)} values")
        if count and last >= len(body):
            raise PayloadError(f"a patch has position {last}, the body {len(body)} units")
        done = 0
        for positions in follow(self.gaps):
            body[positions] = self.values[done : done + len(positions)]
            done += len(positions)
        self.check_result(body)

    def check_fits(self, body: Units) -> None:
        """Raise `PayloadError` unless a body has the size and the units of this patch."""
        if (len(body), body.dtype) != (self.size, self.values.dtype):
            raise PayloadError(
                f"a patch is for a body of {self.size} {self.values.dtype}, this one has "
                f"{len(body)} {body.dtype}"
            )

    def results_in(self, body: Units) -> bool:
        """Return whether a body has the checksum of the result, if that has one.

        Raises:
            RequirementError: the sender's hash library is not installed here.
        """
        known = self.checksum
        return known is None or checksum(body, known.hashed_by) == known

    def check_result(self, body: Units) -> None:
        """Raise `PayloadError` where a body has another checksum than the result."""
        if not self.results_in(body):
            assert self.checksum is not None
            found = checksum(body, self.checksum.hashed_by)
            raise PayloadError(
                f"version {self.version} has the checksum {found.value:016x} here and "
                f"{self.checksum.value:016x} at the sender"
            )

    def to_tensor(self, compress: Compression | None = None) -> Tensor:
        """Return the patch as the tensor of bytes in which it travels."""
        values, gaps = self.values.view(np.uint8), self.gaps.view(np.uint8)
        hashed_by, checksum_ = self.checksum or (0, 0)
        flags = hashed_by
        if compress is not None:
            compressor = zstd().ZstdCompressor(level=_LEVEL)
            values, gaps = (
                np.frombuffer(compressor.compress(part.data), np.uint8) for part in (values, gaps)
            )
            flags |= _COMPRESSED
        header = _HEADER.pack(
            _MAGIC,
            self.values.itemsize,
            self.gaps.itemsize,
            flags,
            self.base,
            self.version,
            len(self.values),
            len(self.gaps),
            self.size,
            checksum_,
            len(values),
            len(gaps),
            bytes.fromhex(self.digest),
        )
        parts = np.frombuffer(header, np.uint8), values, gaps
        return torch.from_numpy(np.concatenate(parts))

    def to_payload(self, compress: Compression | None = None) -> Payload:
        """Return the increment as a version that travels: one tensor, which builds on ``base``."""
        tensor = self.to_tensor(compress)
        layout = Layout((TensorSpec(INCREMENT, torch.uint8, tuple(tensor.shape), 0),))
        return Payload(self.version, layout, (tensor,), base=self.base)

    @classmethod
    def from_payload(cls, payload: Payload, body_nbytes: int | None = None) -> Patch:
        """Return the patch that `to_payload` made a version of; see `from_tensor`.

        Raises:
            PayloadError: the version is a whole one, or not a patch.
        """
        specs = payload.layout.specs
        if [(spec.name, spec.dtype) for spec in specs] != [(INCREMENT, torch.uint8)]:
            raise PayloadError(f"version {payload.version} is not an increment of another")
        return cls.from_tensor(payload.tensors[0], body_nbytes)

    @classmethod
    def from_tensor(cls, tensor: Tensor, body_nbytes: int | None = None) -> Patch:
        """Return the patch that `to_tensor` made; it may be a view of the tensor.

        Args:
            tensor: the bytes.
            body_nbytes: the size of the body that it is for. A compressed patch for a larger one is
                not expanded. None: any.

        Raises:
            PayloadError: the bytes are not a patch, or one for a larger body.
        """
        data = tensor.cpu().contiguous().numpy()
        try:
            magic, unit, gap, flags, *numbers, digest = _HEADER.unpack_from(
                data[:HEADER_NBYTES].tobytes()
            )
            base, version, count, steps, size, checksum_, values_nbytes, gaps_nbytes = numbers
            end = HEADER_NBYTES + values_nbytes
            values, gaps = data[HEADER_NBYTES:end], data[end : end + gaps_nbytes]
            if magic != _MAGIC or unit not in (1, 2, 4, 8) or gap not in _SKIP:
                raise ValueError("it does not begin as one")
            if flags & ~_COMPRESSED not in (0, _XXH3, _SHA256):
                raise ValueError(f"it has the flags {flags}")
            if not count <= size < _TOO_LARGE or not count <= steps <= count + size:
                raise ValueError(f"it has {count} positions and {steps} gaps in {size} units")
            if flags & _COMPRESSED:
                if body_nbytes is not None and size * unit > body_nbytes:
                    raise ValueError(
                        f"it is for {size * unit} bytes, and the body has {body_nbytes}"
                    )
                if steps > count + size // _SKIP[gap] + 1:
                    raise ValueError(f"it has {steps} gaps for {count} positions in {size} units")
                values, gaps = _expand(values, count * unit), _expand(gaps, steps * gap)
            if (len(values), len(gaps)) != (count * unit, steps * gap):
                raise ValueError("it is not as long as it says")
        except (ValueError, struct.error) as error:
            raise PayloadError(f"not a patch: {error}") from error
        hashed_by = flags & ~_COMPRESSED
        return cls(
            base,
            version,
            digest.hex(),
            BodyChecksum(hashed_by, checksum_) if hashed_by else None,
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


# The value of a gap of 1 or 2 bytes that leads to no position.
_SKIP = {1: (1 << 8) - 1, 2: (1 << 16) - 1}
# Gaps that are made or followed at once: their positions fit into a core's cache.
_AT_ONCE = 1 << 15


def shorten(gaps: NDArray[Any]) -> Units:
    """Return gaps in one or two bytes each, whichever takes less.

    The highest value leads so far, and to no position there: a longer gap continues after it.

    Args:
        gaps: from each position to the next one, the first from the begin of the body.

    Example:
        >>> shorten(np.array([2, 3, 295]))
        array([  2,   3, 255,  40], dtype=uint8)
    """
    # Each multiple of the highest value in a gap is one step more.
    steps = {width: len(gaps) + _steps_more(gaps, skip) for width, skip in _SKIP.items()}
    width = min(_SKIP, key=lambda width: width * steps[width])
    found = [np.empty(0, f"u{width}")]
    for begin in range(0, len(gaps), _AT_ONCE):
        some = gaps[begin : begin + _AT_ONCE]
        where = np.flatnonzero(some >= _SKIP[width])
        more = some[where] // _SKIP[width]
        short = some.astype(found[0].dtype)
        short[where] = some[where] - more * _SKIP[width]
        before = np.repeat(where, more.astype(np.int64))
        found.append(np.insert(short, before, _SKIP[width]))
    return np.concatenate(found)


def _steps_more(gaps: NDArray[Any], skip: int) -> int:
    return int((gaps[gaps >= skip] // skip).sum())


def follow(gaps: Units) -> Iterator[NDArray[np.int64]]:
    """Return the positions that gaps lead to, ascending, some at a time.

    Example:
        >>> [positions.tolist() for positions in follow(np.array([2, 3, 255, 40], np.uint8))]
        [[2, 5, 300]]
    """
    at = 0
    for begin in range(0, len(gaps), _AT_ONCE):
        some = gaps[begin : begin + _AT_ONCE]
        ends = np.cumsum(some, dtype=np.int64)
        ends += at
        at = int(ends[-1])
        yield ends[some != _SKIP[gaps.itemsize]]


def positions_of(gaps: Units) -> NDArray[np.int64]:
    """Return all positions that gaps lead to."""
    return np.concatenate([np.empty(0, np.int64), *follow(gaps)])


def checksum(body: Units, hashed_by: int | None = None) -> BodyChecksum:
    """Return a checksum of a body.

    Args:
        body: the body.
        hashed_by: the hash; None for XXH3 where its library is installed, and SHA-256 elsewhere.

    Raises:
        RequirementError: the hash is XXH3, and its library is not installed.
    """
    data: Any = body.view(np.uint8)
    hashed_by, digest = _hash_of(hashed_by)
    sums = np.zeros(-(-len(data) // _SUMMED), np.uint64)

    def add(index: int) -> None:
        sums[index] = digest(data[index * _SUMMED : (index + 1) * _SUMMED])

    in_two_threads(add, deque(range(len(sums))), len(data))
    return BodyChecksum(hashed_by, digest(sums.view(np.uint8)))


def _hash_of(hashed_by: int | None) -> tuple[int, Callable[[Any], int]]:
    if hashed_by != _SHA256:
        try:
            from xxhash import xxh3_64_intdigest
        except ImportError as error:
            if hashed_by is not None:
                raise RequirementError(
                    "the trainer sends checksums of increments by XXH3, which need the hash "
                    'library xxhash here too: pip install "sync-plugin-scale[verify]"'
                ) from error
        else:
            return _XXH3, xxh3_64_intdigest
    return _SHA256, lambda data: int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


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
            'pip install "sync-plugin-scale[zstd]"'
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
