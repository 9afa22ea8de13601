"""Compares a version with the packed body of the one before, and makes it that version.

Bits are compared, so NaN equals itself and -0.0 differs from 0.0. A piece that was compared is
still in a core's cache, so that its differences are written in the same pass. Two threads share the
pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sync_core import Layout, Payload
from sync_core.transports import ALIGNMENT, Block, copy, in_two_threads
from sync_plugin_scale.increments.patch import Units, padded_nbytes, unit_nbytes, units_of

# Compared at a time, in bytes: the pieces of both sides fit into a core's cache.
_PIECE = 1 << 20
# Small tensors are packed together, up to so many bytes, before they are compared.
_GROUP = 1 << 20
# Where one word in so many differs, comparing units alone is faster.
_DENSE = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """The units of a body that `Comparer.update` has changed.

    Args:
        gaps: from each unit that differed to the next one, the first from the begin.
        values: their values now.
        before: their values before; empty where that was not asked for.
        complete: False where there were too many, so that only some were changed.
    """

    gaps: NDArray[Any]
    values: Units
    before: Units
    complete: bool

    @property
    def positions(self) -> NDArray[np.int64]:
        """Of the units that differed, ascending."""
        return np.cumsum(self.gaps, dtype=np.int64)


class Comparer:
    """Finds where payloads of one layout differ from a packed body, and writes it there.

    Large tensors in the memory of the host are compared where they lie; small ones are packed into
    a megabyte of scratch memory together, and those of a GPU pass through it.

    Args:
        layout: the layout.
    """

    def __init__(self, layout: Layout) -> None:
        self._nbytes = layout.body_nbytes
        self._unit = unit_nbytes(layout)
        self._groups = list(_groups(layout))
        sizes = (padded_nbytes(group.layout) for group in self._groups if not group.large)
        scratch = Block.allocate(max(sizes, default=0))
        self._blocks = [Block(scratch.memory) for _ in self._groups]

    def update(
        self, body: Units, payload: Payload, limit: int, *, keep: bool = False
    ) -> Difference:
        """Make the body of an earlier version that of a payload.

        Args:
            body: see `units_of`. Should this raise, it holds parts of both versions.
            payload: a version of the same layout.
            limit: how many positions may differ.
            keep: whether to return the values before.
        """
        comparison = _Comparison(body, limit, keep=keep)
        with payload.packing:
            large, others = self._divide(payload)
            for piece in others:
                comparison.replace(piece)
            in_two_threads(comparison.replace, large, self._nbytes)
        return comparison.result()

    def _divide(self, payload: Payload) -> tuple[deque[_Piece], Iterator[_Piece]]:
        """The pieces that can be read where they lie, and an iterator of the others."""
        tensors = payload.tensors
        large: deque[_Piece] = deque()
        others = []
        for group, block in zip(self._groups, self._blocks, strict=True):
            some = tensors[group.first : group.last]
            flat = _in_place(some[0]) if group.large else None
            if flat is None:
                others.append((group, block, some))
            else:
                large.extend(self._pieces(group.offset, flat))
        return large, self._copied(others)

    def _copied(self, groups: list[tuple[_Group, Block, tuple[Tensor, ...]]]) -> Iterator[_Piece]:
        """The pieces of other tensors; the bytes of each are good until the next one."""
        for group, block, tensors in groups:
            if group.large:
                offset = group.offset
                for part in _flat(tensors[0]).split(_GROUP // tensors[0].element_size()):
                    yield from self._pieces(offset, part.to("cpu", copy=True))
                    offset += part.nbytes
            else:
                body = units_of(block, group.layout)
                body.fill(0)
                copy(block.views(group.layout), tensors)
                yield group.offset // self._unit, body.view(f"u{self._unit}")

    def _pieces(self, offset: int, flat: Tensor) -> Iterator[_Piece]:
        """Stretches of a tensor's bytes, each with the unit at which it begins."""
        data = flat.view(torch.uint8).numpy()
        for begin in range(0, len(data), _PIECE):
            piece = data[begin : begin + _PIECE]
            if len(piece) % ALIGNMENT:
                piece = np.concatenate([piece, np.zeros(-len(piece) % ALIGNMENT, np.uint8)])
            yield (offset + begin) // self._unit, piece.view(f"u{self._unit}")


# The unit at which a piece begins, and its units.
_Piece = tuple[int, Units]


@dataclass(frozen=True, slots=True)
class _Found:
    """The units of a piece that differed, as in `Difference`; gaps count from its first unit."""

    start: int
    last: int
    gaps: NDArray[Any]
    values: Units
    before: Units


_start_of, _gaps_of, _values_of, _before_of = map(attrgetter, ("start", "gaps", "values", "before"))


class _Comparison:
    """Collects the differences of one version; pieces come in any order, from two threads."""

    def __init__(self, body: Units, limit: int, *, keep: bool) -> None:
        self._body = body
        self._limit = limit
        self._keep = keep
        self._gap = np.uint32 if len(body) < 1 << 32 else np.int64
        self._found: list[_Found] = []
        # Of positions; threads may lose some of it, so it is only good for stopping early.
        self._count = 0

    def replace(self, piece: _Piece) -> None:
        """Make a piece of the body what it is in the version."""
        start, new = piece
        if self._count > self._limit:
            return
        positions, before, values = replace_units(self._body[start : start + len(new)], new)
        if len(positions):
            gaps = np.diff(positions, prepend=0).astype(self._gap)
            last = start + int(positions[-1])
            found = _Found(start, last, gaps, values, before if self._keep else self._body[:0])
            self._found.append(found)
            self._count += len(positions)

    def result(self) -> Difference:
        """Return all differences, in order."""
        found, self._found = sorted(self._found, key=_start_of), []
        gaps = np.concatenate([np.empty(0, self._gap), *map(_gaps_of, found)])
        done = last = 0
        for part in found:
            gaps[done] += part.start - last
            done, last = done + len(part.gaps), part.last
        none = self._body[:0]
        values = np.concatenate([none, *map(_values_of, found)])
        before = np.concatenate([none, *map(_before_of, found)])
        return Difference(gaps, values, before, complete=len(gaps) <= self._limit)


def replace_units(old: Units, new: Units) -> tuple[NDArray[np.int64], Units, Units]:
    """Make one row of units equal to another of the same length, a multiple of 8 bytes.

    Returns:
        The positions at which they differed, and the values there before and now.
    """
    each = 8 // old.itemsize
    before, after = old.view(np.uint64), new.view(np.uint64)
    # Most are equal, so words of eight bytes are compared first.
    words = np.flatnonzero(before != after)
    if not len(words):
        return words, old[:0], new[:0]
    if each == 1 or len(words) * _DENSE > len(before):
        positions = words if each == 1 else np.flatnonzero(old != new)
        values = old[positions], new[positions]
        np.copyto(old, new)
        return positions, *values
    was, now = before[words], after[words]
    before[words] = now
    was, now = was.view(old.dtype), now.view(old.dtype)
    units = np.flatnonzero(was != now)
    shift = each.bit_length() - 1
    positions = (words[units >> shift] << shift) + (units & (each - 1))
    return positions, was[units], now[units]


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


def _in_place(tensor: Tensor) -> Tensor | None:
    """Return the elements of a tensor whose bytes can be read as words where they lie."""
    direct = tensor.device.type == "cpu" and tensor.data_ptr() % 8 == 0 and tensor.is_contiguous()
    plain = direct and not tensor.is_conj() and not tensor.is_neg()
    return _flat(tensor) if plain else None


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
