"""The parts of a version that ranks write together: which rank writes what, and where it is found.

Each rank knows the parts that it holds. From those of all ranks, every rank computes the same
assignment: of ranks that hold the same region of a tensor, one writes it. A version's manifest
refers to the assignment, and readers plan by it.
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
    """A part of a tensor.

    Args:
        view: the name under which it is written.
        name: the name of the tensor in the version.
        region: the part.
        shape: the shape of the whole tensor.
    """

    view: str
    name: str
    region: Region
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of what a reader wants, and where it lies.

    Args:
        view: the position of what is wanted.
        file: the position of the file of the version.
        name: the tensor in that file.
        shape: its shape; None where any will do.
        region: the part, in coordinates of that tensor.
        at: the part, in coordinates of what is wanted.
    """

    view: int
    file: int
    name: str
    shape: tuple[int, ...] | None
    region: Region
    at: Region


class JoinedHoldings:
    """The parts that all ranks write, each element once.

    Args:
        ranks: the parts of each rank, in the order of the ranks.

    Raises:
        LayoutMismatchError: they overlap, leave gaps, or the ranks do not agree on a tensor; the
            tensors are named.
    """

    def __init__(self, ranks: Sequence[Holding]) -> None:
        self.ranks = tuple(ranks)
        self._model = WholeModel(self.ranks)
        #: Names, dtypes and shapes of the tensors that readers have.
        self.layout = self._model.layout
        self.copies(self.everything())

    def everything(self) -> tuple[Wanted, ...]:
        """Return what a reader of all tensors wants."""
        return tuple(
            Wanted(s.name, s.name, whole_region(s.shape), s.shape) for s in self.layout.specs
        )

    def copies(self, wanted: Sequence[Wanted]) -> list[Copy]:
        """Return where the parts of what a reader wants lie.

        Args:
            wanted: each of them has another view.

        Raises:
            LayoutMismatchError: the version does not have that.
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
        """Return them as they are stored; the same for the same parts."""
        return write_holdings(self.ranks)

    @staticmethod
    @lru_cache(maxsize=4)
    def from_bytes(data: bytes) -> JoinedHoldings:
        """Return what `to_bytes` wrote.

        Raises:
            PayloadError: it is something else, or its parts overlap or leave gaps.
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
    """Return the parts that each rank writes of those that it holds.

    Of ranks that hold the same region, the one writes it that writes the fewest bytes so far.

    Args:
        holdings: what each rank holds, in the order of the ranks.

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
    # Says where they differ.
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
    """Return what ranks hold as it is stored; the same for the same parts."""
    content = [holding.to_json() for holding in holdings]
    return json.dumps(content, separators=(",", ":")).encode()


def read_holdings(data: bytes) -> list[Holding]:
    """Return what `write_holdings` was given.

    Raises:
        PayloadError: it is something else.
    """
    try:
        return [Holding.from_json(each) for each in json.loads(data)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PayloadError(f"not the parts of ranks: {error!r:.300}") from error


def file_layout(holding: Holding) -> Layout:
    """Return the layout of the file that a rank writes, without extras."""
    return Layout.of_kinds((t.name, t.dtype, shape_of(t.region)) for t in holding.tensors)
