"""Cuts a payload into chunks, and packs one while earlier ones are sent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sync_core import Layout, Payload
from sync_core.transports import Block


def cut(block: Block, nbytes: int, part_nbytes: int) -> list[Tensor]:
    """The first bytes of a block, as parts that are sent one after the other.

    Example:
        >>> [len(part) for part in cut(Block.allocate(1000), 900, 400)]
        [400, 400, 100]
    """
    return list(block.memory[:nbytes].split(part_nbytes))


def pack(payload: Payload, block: Block, part_nbytes: int) -> Iterator[int]:
    """Pack a payload from its beginning, and give from time to time how many bytes are done.

    Small tensors are packed together; one larger than a part is packed bit by bit, so that what
    was packed is still in the processor's cache when it is sent. So is the whole of a model whose
    tensors lie side by side.

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
    # One thread copies: several of torch would wait for each other, and for those that send.
    to, of = _bytes(target), _bytes(source)
    for done in range(0, max(1, len(to)), part_nbytes):
        np.copyto(to[done : done + part_nbytes], of[done : done + part_nbytes])
        yield min(end, end - len(to) + done + part_nbytes)


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    plain = tensor.detach().resolve_conj().resolve_neg()
    # A single element is contiguous whatever its stride, which a view of its bytes has to lose.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


@lru_cache(maxsize=16)
def _groups(layout: Layout, part_nbytes: int) -> list[tuple[int, int, int]]:
    """Tensors that are packed together: the first, the one after the last, where they end."""
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
