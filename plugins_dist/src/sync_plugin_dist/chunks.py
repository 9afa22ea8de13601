"""Split a payload into parts, pack and hash them while earlier parts are sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from sync_core import Layout, Payload
from sync_core.transports import Block


def cut(block: Block, nbytes: int, part_nbytes: int) -> list[Tensor]:
    """Split the first bytes of a block into parts.

    Example:
        >>> [len(part) for part in cut(Block.allocate(1000), 900, 400)]
        [400, 400, 100]
    """
    return list(block.memory[:nbytes].split(part_nbytes))


# One thread hashes 1 to 2 GB/s on processors with SHA-256 instructions.
_SUMMING_THREADS = 4
# Smaller parts, in bytes, are hashed faster than a thread could start.
_SMALL_NBYTES = 1 << 17


class PartSums:
    """Computes the SHA-256 over the SHA-256 of each part, while later parts arrive.

    So no member of a broadcast can forge the parts that it passes on. Use it as a context manager,
    which ends its threads.

    Example:
        >>> with PartSums() as sums:
        ...     for part in cut(Block.allocate(1000), 900, 400):
        ...         sums.add(part)
        ...     len(sums.result())
        64
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._sums: list[bytes | Future[bytes]] = []

    @property
    def count(self) -> int:
        """The number of parts added so far."""
        return len(self._sums)

    def add(self, part: Tensor) -> None:
        """Add the next part, which must not change until `result`."""
        if part.nbytes < _SMALL_NBYTES:
            self._sums.append(_sum(part))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_SUMMING_THREADS, "sync-dist-sum")
        self._sums.append(self._pool.submit(_sum, part))

    def result(self) -> str:
        """Return the hash of all parts."""
        sums = [each if isinstance(each, bytes) else each.result() for each in self._sums]
        return hashlib.sha256(b"".join(sums)).hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _sum(part: Tensor) -> bytes:
    data: Any = part.cpu().numpy()
    return hashlib.sha256(data).digest()


def pack(payload: Payload, block: Block, part_nbytes: int) -> Iterator[int]:
    """Pack a payload from its beginning; yield the number of packed bytes from time to time.

    Small tensors are packed together. A tensor larger than a part is packed in steps, so that
    packed bytes are sent while they are still in the processor's cache. The same holds for a model
    whose tensors are contiguous in memory.

    Example:
        >>> block, tensor = Block.allocate(1 << 20), torch.ones(600)
        >>> payload = Payload(1, Layout.of({"w": tensor}), (tensor,))
        >>> start = len(payload.layout.header)
        >>> [done - start for done in pack(payload, block, 1000)]
        [1000, 2000, 2400]
    """
    if payload.is_streamed:
        yield from payload.pack_in_steps(block)
        return
    payload.packed.append(block)
    block.write_header(payload.layout)
    if payload.bodies:
        (target,), (source,) = block.bodies(payload.layout), payload.bodies
        yield from _pack_large(target, source, payload.nbytes, part_nbytes)
        return
    targets, sources = block.views(payload.layout), payload.tensors
    for first, last, end in _groups(payload.layout, part_nbytes):
        if last - first > 1 or targets[first].nbytes <= part_nbytes:
            payload.pack(block, range(first, last))
            yield end
        else:
            yield from _pack_large(targets[first], sources[first], end, part_nbytes)


def _pack_large(target: Tensor, source: Tensor, end: int, part_nbytes: int) -> Iterator[int]:
    if source.device.type != "cpu" or target.device.type != "cpu" or not source.is_contiguous():
        with torch.no_grad():
            target.copy_(source)
        yield end
        return
    # One thread copies: several torch threads would wait for each other and for sending threads.
    to, of = _bytes(target), _bytes(source)
    for done in range(0, max(1, len(to)), part_nbytes):
        np.copyto(to[done : done + part_nbytes], of[done : done + part_nbytes])
        yield min(end, end - len(to) + done + part_nbytes)


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    plain = tensor.detach().resolve_conj().resolve_neg()
    # A tensor with one element may have any stride, with which a view of its bytes would fail.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


@lru_cache(maxsize=16)
def _groups(layout: Layout, part_nbytes: int) -> list[tuple[int, int, int]]:
    """Group the tensors to pack together: the first, the one after the last, and their end."""
    start = len(layout.header)
    groups: list[tuple[int, int, int]] = []
    first = begin = end = 0
    for position, spec in enumerate(layout.specs):
        if first < position and spec.offset + spec.nbytes - begin > part_nbytes:
            groups.append((first, position, start + end))
            first, begin = position, spec.offset
        end = spec.offset + spec.nbytes
    if layout.specs:
        groups.append((first, len(layout.specs), start + end))
    return groups
