"""Memory that holds one payload: the header, then the tensors."""

from __future__ import annotations

import mmap
import operator
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from sync_core.errors import CapacityError, PayloadError
from sync_core.weights.layout import MAX_HEADER_BYTES, Layout, TensorSpec


def allocate(nbytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, a child of `os.fork` gets its own copy.

    Raises:
        CapacityError: there is not enough of it.
    """
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, nbytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(f"{nbytes} bytes of memory cannot be allocated: {error}") from error
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_offset = operator.attrgetter("offset")

# From here on, memory in large pages, which begins with one, is copied to and from faster.
_LARGE = 1 << 21


class Block:
    """Memory with the tensors of a layout laid over it.

    The views are made once for a layout and kept, so that a transport that keeps its blocks does
    no work per tensor from then on.

    Args:
        memory: a one-dimensional uint8 tensor, its first byte aligned to 64 bytes.
        more: such tensors, which continue where the one before ends; for a payload that arrives in
            several stretches. The header lies in the first, and no tensor lies in two.

    Example:
        >>> block = Block.allocate(1024)
        >>> layout = Layout.of({"weight": torch.ones(2, 3)})
        >>> [view.shape for view in block.views(layout)]
        [torch.Size([2, 3])]
    """

    def __init__(self, memory: Tensor, *more: Tensor) -> None:
        self.memory = memory
        self._stretches = (memory, *more)
        self._layout: Layout | None = None
        self._written: Layout | None = None
        self._views: tuple[Tensor, ...] = ()
        self._divided: Layout | None = None
        self._bodies: tuple[Tensor, ...] = ()
        #: Size in bytes.
        self.nbytes = sum(map(Tensor.numel, self._stretches))

    @classmethod
    def allocate(cls, nbytes: int) -> Block:
        """A block of private memory."""
        if nbytes < _LARGE:
            return cls(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        return cls(torch.frombuffer(allocate(nbytes), dtype=torch.uint8))

    @classmethod
    def of_bytes(cls, data: bytes | bytearray | memoryview) -> Block:
        """A block with a copy of ``data``."""
        block = cls.allocate(len(data))
        block.memory.numpy()[:] = memoryview(data).cast("B")
        return block

    def views(self, layout: Layout) -> tuple[Tensor, ...]:
        """The tensors of ``layout`` as views of this memory.

        Raises:
            PayloadError: the memory is too small, or one of the tensors lies in two stretches.
        """
        if self._layout is not layout:
            # They outlive the mode in which they are first asked for.
            with torch.inference_mode(mode=False):
                self._views = tuple(_views(self.bodies(layout), layout))
            self._layout = layout
        return self._views

    def bodies(self, layout: Layout) -> tuple[Tensor, ...]:
        """The bytes of the tensors of ``layout``, one stretch after the other."""
        if self._divided is layout:
            return self._bodies
        self.check_holds(layout)
        skipped, left, found = len(layout.header), layout.body_nbytes, []
        for stretch in self._stretches:
            body = stretch[skipped : skipped + left]
            skipped, left = max(0, skipped - stretch.numel()), left - body.numel()
            found.append(body)
        self._bodies, self._divided = tuple(found), layout
        return self._bodies

    def check_holds(self, layout: Layout) -> None:
        """Raise `PayloadError` where this memory is too small for ``layout``."""
        if layout.nbytes > self.nbytes:
            raise PayloadError(
                f"the payload needs {layout.nbytes} bytes, the block has {self.nbytes}"
            )

    def write_header(self, layout: Layout) -> None:
        """Write the header of ``layout``, unless it is there already."""
        if self._written is layout:
            return
        size = len(layout.header)
        self.memory[:size].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
        self._written = layout

    def read_layout(self, digest: str | None = None, known: Layout | None = None) -> Layout:
        """The layout whose header is in this memory.

        Args:
            digest: what its digest must be, or begin with; one that was read before is not read
                again.
            known: another layout that need not be read again if it has that digest, or header.

        Raises:
            PayloadError: no header, one of another digest, or one that promises more bytes than
                there are.
        """
        for layout in (self._layout, known):
            if digest is not None and layout is not None and layout.digest.startswith(digest):
                break
        else:
            layout = self._read_header(digest, known)
        if layout is not self._layout:  # which lies here already
            self.check_holds(layout)
        return layout

    def _read_header(self, digest: str | None, known: Layout | None) -> Layout:
        length = int.from_bytes(_bytes(self.memory[:8]), "little")
        if length > min(MAX_HEADER_BYTES, self.memory.numel() - 8):
            raise PayloadError(f"a header of {length} bytes does not fit; this is not a payload")
        header = _bytes(self.memory[: 8 + length])
        if digest is None and known is not None and known.header == header:
            return known
        layout = Layout.from_header(header)
        if digest is not None and not layout.digest.startswith(digest):
            raise PayloadError(
                f"expected the layout {digest[:12]}, found {layout.digest[:12]} in the payload"
            )
        return layout


def tensors_of(source: Sequence[Tensor] | Block, layout: Layout) -> tuple[Tensor, ...]:
    """The tensors themselves, or those that lie in a block."""
    if isinstance(source, Block):
        return source.views(layout)
    return source if isinstance(source, tuple) else tuple(source)


def bodies_of(source: Sequence[Tensor] | Block, layout: Layout) -> tuple[Tensor, ...]:
    """The bytes that tensors in a block are views of, in stretches; none of those elsewhere."""
    return source.bodies(layout) if isinstance(source, Block) else ()


def _bytes(memory: Tensor) -> bytes:
    return memory.cpu().numpy().tobytes()


def _views(bodies: Sequence[Tensor], layout: Layout) -> Iterator[Tensor]:
    """Each tensor of the layout, in the body in which it begins."""
    specs, first, begin = layout.specs, 0, 0
    for body in bodies:
        end = begin + body.numel()
        last = end == layout.body_nbytes
        after = len(specs) if last else bisect_left(specs, end, first, key=_offset)
        inside = specs[first:after]
        if inside and inside[-1].offset + inside[-1].nbytes > end:
            raise PayloadError(f"{inside[-1].name!r} lies in two stretches of the payload")
        yield from _views_in(body, begin, inside)
        first, begin = after, end


def _views_in(body: Tensor, begin: int, specs: Iterable[TensorSpec]) -> Iterator[Tensor]:
    """Each of the tensors in a body, by one call of torch instead of three."""
    start = int(body.storage_offset())
    typed: dict[torch.dtype, Tensor] = {}
    for spec in specs:
        offset = spec.offset - begin
        position, remainder = divmod(start + offset, spec.dtype.itemsize)
        if remainder:
            # Other writers of safetensors align less than torch needs for a view.
            yield _bytes_of(body, offset, spec).clone().view(spec.dtype).view(spec.shape)
            continue
        if spec.dtype not in typed:
            typed[spec.dtype] = _bytes_of(body, offset, spec).view(spec.dtype)
        yield typed[spec.dtype].as_strided(spec.shape, _strides(spec.shape), position)


def _bytes_of(body: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    return body[offset : offset + spec.nbytes]


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    inner = [max(size, 1) for size in shape[:0:-1]]
    return tuple(accumulate(inner, operator.mul, initial=1))[::-1] if shape else ()
