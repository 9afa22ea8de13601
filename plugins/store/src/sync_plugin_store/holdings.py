"""Assigns the parts of a version to the ranks that write them, and finds them for readers.

From the parts that each rank holds, every rank computes the same assignment: if several ranks hold
the same region of a tensor, one of them writes it. A version's manifest refers to the assignment,
and readers plan their reads with it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from sync_core import Layout
from sync_core.errors import LayoutMismatchError, PayloadError
from sync_core.models import Region
from sync_plugin_scale import Holding
from sync_plugin_scale.shards import (
    WholeModel,
    plan_parts,
    shape_of,
    shifted,
    size_of,
    whole_region,
)

__all__ = [
    "Copy",
    "JoinedHoldings",
    "Wanted",
    "assign",
    "file_layout",
    "read_holdings",
    "write_holdings",
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A region of a tensor that a reader requests.

    Args:
        view: the name under which the reader writes it.
        name: the name of the tensor in the version.
        region: the range in each dimension.
        shape: the shape of the whole tensor.
    """

    view: str
    name: str
    region: Region
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """The location, in one file, of a part of a requested region.

    Args:
        view: the index of the request.
        file: the index of the file in the version.
        name: the tensor in that file.
        shape: its shape; None to accept any shape.
        region: the part in coordinates of that tensor.
        at: the part in coordinates of the requested region.
    """

    view: int
    file: int
    name: str
    shape: tuple[int, ...] | None
    region: Region
    at: Region


class JoinedHoldings:
    """The parts that all ranks write; together they have each element exactly once.

    Args:
        ranks: the parts of each rank, by rank.

    Raises:
        LayoutMismatchError: parts overlap or leave gaps, or ranks do not agree on a tensor. The
            message names the tensors.
    """

    def __init__(self, ranks: Sequence[Holding]) -> None:
        self.ranks = tuple(ranks)
        self._model = WholeModel(self.ranks)
        #: Names, dtypes and shapes of the readers' tensors.
        self.layout = self._model.layout
        self.copies(self.everything())

    def everything(self) -> tuple[Wanted, ...]:
        """Return the requests for all tensors, whole."""
        return tuple(
            Wanted(s.name, s.name, whole_region(s.shape), s.shape) for s in self.layout.specs
        )

    def copies(self, wanted: Sequence[Wanted]) -> list[Copy]:
        """Return the locations of all requested parts.

        Args:
            wanted: the requests, each with a different view.

        Raises:
            LayoutMismatchError: the version does not have a requested part.
        """
        held = {each.view: self._model.held(each.name) for each in wanted}
        found = plan_parts(held, {each.view: each.region for each in wanted})
        copies = []
        for position, each in enumerate(wanted):
            offset = [-start for start, _ in each.region]
            for rank, part in found[each.view]:
                for name, region, at in self._model.origin(each.name, part):
                    tensor = self.ranks[rank].tensors[self._model.positions[rank][name]]
                    inside = shifted(region, [-start for start, _ in tensor.region])
                    shape = shape_of(tensor.region)
                    copies.append(
                        Copy(position, rank, tensor.name, shape, inside, shifted(at, offset))
                    )
        return copies

    def to_bytes(self) -> bytes:
        """Return the parts as stored; equal parts give equal bytes."""
        return write_holdings(self.ranks)

    @staticmethod
    @lru_cache(maxsize=4)
    def from_bytes(data: bytes) -> JoinedHoldings:
        """Return the parts that `to_bytes` wrote.

        Raises:
            PayloadError: the bytes are something else, or the parts overlap or leave gaps.
        """
        ranks = read_holdings(data)
        expected = [(rank, len(ranks)) for rank in range(len(ranks))]
        if not ranks or [(each.rank, each.size) for each in ranks] != expected:
            raise PayloadError(f"a list of the parts of {len(ranks)} ranks is of other ranks")
        try:
            return JoinedHoldings(ranks)
        except LayoutMismatchError as error:
            raise PayloadError(f"the ranks have not written a whole version: {error}") from error


def assign(holdings: Sequence[Holding]) -> JoinedHoldings:
    """Choose which of its parts each rank writes.

    If several ranks hold a region, the rank with the fewest bytes so far writes it.

    Args:
        holdings: the parts that each rank holds, by rank.

    Raises:
        LayoutMismatchError: see `JoinedHoldings`.

    Example:
        >>> import torch
        >>> from sync_plugin_scale import HeldTensor
        >>> both = HeldTensor("bias", torch.float32, ((0, 4),), (4,))
        >>> upper = HeldTensor("weight", torch.float32, ((0, 2), (0, 2)), (4, 2))
        >>> lower = HeldTensor("weight", torch.float32, ((2, 4), (0, 2)), (4, 2))
        >>> joined = assign([Holding(0, 2, (upper, both)), Holding(1, 2, (lower, both))])
        >>> [[tensor.name for tensor in rank.tensors] for rank in joined.ranks]
        [['weight', 'bias'], ['weight']]
        >>> str(joined.layout.specs[1])
        'bias: float32[4]'
    """
    # Raises where the ranks differ.
    whole_model = WholeModel(holdings)
    tied = {alias for holding in holdings for alias, _ in holding.aliases}
    holders: dict[str, dict[Region, list[int]]] = defaultdict(dict)
    for rank, holding in enumerate(holdings):
        for tensor in holding.tensors:
            holders[tensor.name].setdefault(tensor.region, []).append(rank)
    writers: dict[tuple[str, Region], int] = {}
    taken = [0] * len(holdings)
    for name, regions in holders.items():
        full = {region: ranks for region, ranks in regions.items() if size_of(region)}
        if not full and name not in tied:
            # A tensor without elements has a name, a dtype and a shape.
            full = dict([next(iter(regions.items()))])
        for region, ranks in full.items():
            rank = writers[name, region] = min(ranks, key=taken.__getitem__)
            taken[rank] += size_of(region)
    written = []
    for rank, holding in enumerate(holdings):
        tensors = tuple(
            replace(tensor, shape=whole_model.shape(tensor.name))
            for tensor in holding.tensors
            if writers.get((tensor.name, tensor.region)) == rank
        )
        names = {tensor.name for tensor in tensors}
        aliases = tuple(pair for pair in holding.aliases if pair[1] in names)
        made_of = holding.made_of if rank == 0 else None
        written.append(replace(holding, tensors=tensors, aliases=aliases, made_of=made_of))
    return JoinedHoldings(written)


def write_holdings(holdings: Sequence[Holding]) -> bytes:
    """Encode what ranks hold; equal parts give equal bytes."""
    content = [holding.to_json() for holding in holdings]
    return json.dumps(content, separators=(",", ":")).encode()


def read_holdings(data: bytes) -> list[Holding]:
    """Decode the bytes from `write_holdings`.

    Raises:
        PayloadError: the bytes are something else.
    """
    try:
        return [Holding.from_json(each) for each in json.loads(data)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PayloadError(f"not the parts of ranks: {error!r:.300}") from error


def file_layout(holding: Holding) -> Layout:
    """Return the layout of a rank's file, without extras."""
    return Layout.of_kinds((t.name, t.dtype, shape_of(t.region)) for t in holding.tensors)
