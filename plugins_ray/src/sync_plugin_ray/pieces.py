"""Cuts a payload into pieces that Ray copies, one after the other, into an object or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sync_core import Layout, Payload
from sync_core.errors import PayloadError
from sync_core.transports import Block

# Tensors of so many bytes are put from where they are; the others are packed together first.
_LARGE = 1 << 18
# Ray aligns each piece to 64 bytes, as a layout does its tensors.
_ALIGNMENT = 64
# Those of more than a megabyte it copies with threads that it starts for each, which takes longer.
_PIECE = 1 << 20
# From so many bytes on, an object of its own, put by a thread of its own, is worth its cost.
_WORTHWHILE = 8 << 20

Array = np.ndarray[Any, Any]


class Cutter:
    """Makes the pieces of one payload after the other."""

    def __init__(self) -> None:
        self._block = Block.allocate(0)
        self._layout: Layout | None = None
        self._large: list[int] = []
        self._halves: list[slice] = []

    def cut(self, payload: Payload) -> list[list[Array]]:
        """The payload's bytes: views of its large tensors, and between them what was packed.

        They are good until the tensors change, or the next payload is cut.

        Returns:
            One stretch of pieces; or two of about the same size, with whole tensors in each.
        """
        layout = payload.layout
        if payload.bodies:
            # A few large pieces: for those, the threads that Ray starts are worth it.
            header = np.frombuffer(layout.header, dtype=np.uint8)
            return [[header, *(body.numpy() for body in payload.bodies)]]
        tensors = payload.tensors
        if self._layout is not layout:
            self._layout = layout
            self._large = [i for i, spec in enumerate(layout.specs) if _is_large(spec.nbytes)]
            self._halves = _halves(layout)
        if self._block.nbytes < payload.nbytes:
            # Memory is taken as it is written to, so what is never packed costs none.
            self._block = Block.allocate(payload.nbytes)
        alone = [i for i in self._large if _is_plain(tensors[i])]
        others = sorted(set(range(len(tensors))).difference(alone)) if alone else None
        payload.pack(self._block, others)
        memory = self._block.memory.numpy()
        runs, begin = [], 0
        for i in alone:
            spec = layout.specs[i]
            start = len(layout.header) + spec.offset
            runs += [memory[begin:start], _bytes_of(tensors[i])]
            begin = start + spec.nbytes
        runs.append(memory[begin : payload.nbytes])
        return [list(_pieces(runs, half)) for half in self._halves]


def join(pieces: list[Any]) -> Array:
    """The bytes that were cut, where they lie if they lie one after the other.

    Raises:
        PayloadError: they are no bytes.
    """
    try:
        arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        ends = [address + len(array) for address, array in zip(addresses, arrays, strict=True)]
        size = (ends[-1] - addresses[0],)
    except (TypeError, ValueError, IndexError) as error:
        found = type(pieces).__name__
        raise PayloadError(f"what was published is no payload, but a {found}") from error
    if ends[:-1] != addresses[1:]:
        return np.concatenate(arrays)
    # Every piece keeps the whole object in memory, and the result keeps the first piece.
    return np.lib.stride_tricks.as_strided(arrays[0], shape=size, writeable=False)


def _halves(layout: Layout) -> list[slice]:
    """The payload's bytes, in two halves where each is worth an object."""
    size = layout.nbytes
    if size >= 2 * _WORTHWHILE:
        starts = (len(layout.header) + spec.offset for spec in layout.specs)
        middle = min(starts, key=lambda start: abs(start - size // 2))
        if _WORTHWHILE <= middle <= size - _WORTHWHILE:
            return [slice(0, middle), slice(middle, size)]
    return [slice(0, size)]


def _pieces(runs: Sequence[Array], wanted: slice) -> Iterator[Array]:
    """What is wanted of the bytes that lie in the runs, one after the other."""
    begin = 0
    for run in runs:
        inside = run[max(0, wanted.start - begin) : max(0, wanted.stop - begin)]
        yield from (inside[at : at + _PIECE] for at in range(0, len(inside), _PIECE))
        begin += len(run)


def _is_large(nbytes: int) -> bool:
    return nbytes >= _LARGE and nbytes % _ALIGNMENT == 0


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _bytes_of(tensor: Tensor) -> Array:
    return tensor.detach().view(-1).view(torch.uint8).numpy()
