"""Plans which source sends which part of each tensor to one destination.

A source holds a region of a tensor, a destination wants one. The destination plans, so no
coordinator is needed, and a worker may join late. Tensors of the same geometry are planned once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from sync_core.errors import LayoutMismatchError
from sync_core.models import Region

_SHOWN = 8


class PlannedPart(NamedTuple):
    """A part of a wanted region, and the source that sends it.

    Args:
        source: the rank of the source.
        region: the part, in coordinates of the whole tensor.
    """

    source: int
    region: Region


Held: TypeAlias = Sequence[tuple[int, Region]]


def whole_region(shape: Iterable[int]) -> Region:
    """The region that is the whole of a tensor.

    Example:
        >>> whole_region((4, 2))
        ((0, 4), (0, 2))
    """
    return tuple((0, size) for size in shape)


def size_of(region: Region) -> int:
    """The number of elements of a region; that of a scalar has one.

    Example:
        >>> size_of(((0, 4), (1, 3))), size_of(()), size_of(((2, 2), (0, 8)))
        (8, 1, 0)
    """
    return prod(stop - start for start, stop in region)


def shape_of(region: Region) -> tuple[int, ...]:
    """The shape of what is in a region.

    Example:
        >>> shape_of(((0, 4), (1, 3)))
        (4, 2)
    """
    return tuple(stop - start for start, stop in region)


def intersect(left: Region, right: Region) -> Region | None:
    """The region in both regions; None if they have no element in common.

    Example:
        >>> intersect(((0, 4), (0, 8)), ((2, 6), (4, 12)))
        ((2, 4), (4, 8))
    """
    common = []
    for (start, stop), (other_start, other_stop) in zip(left, right, strict=True):
        first = max(start, other_start)
        last = min(stop, other_stop)
        if first >= last:
            return None
        common.append((first, last))
    return tuple(common)


def inside(region: Region, owner: Region) -> tuple[slice, ...]:
    """The slices that take a region out of a tensor that holds the region ``owner``.

    Example:
        >>> inside(((4, 6), (0, 2)), ((2, 8), (0, 4)))
        (slice(2, 4, None), slice(0, 2, None))
    """
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(region, owner, strict=True)
    )


def shifted(region: Region, by: Sequence[int]) -> Region:
    """The region moved by an offset in each dimension.

    Example:
        >>> shifted(((0, 4), (1, 3)), (2, -1))
        ((2, 6), (0, 2))
    """
    return tuple((start + n, stop + n) for (start, stop), n in zip(region, by, strict=True))


def subtract(region: Region, taken: Region) -> list[Region]:
    """The rest of a region without another, as regions that do not overlap.

    Example:
        >>> subtract(((0, 4), (0, 4)), ((1, 3), (0, 4)))
        [((0, 1), (0, 4)), ((3, 4), (0, 4))]
    """
    common = intersect(region, taken)
    if common is None:
        return [region]
    left: list[Region] = []
    for axis, ((start, stop), (first, last)) in enumerate(zip(region, common, strict=True)):
        before, after = common[:axis], region[axis + 1 :]
        if start < first:
            left.append((*before, (start, first), *after))
        if last < stop:
            left.append((*before, (last, stop), *after))
    return left


def write_region(region: Region) -> str:
    """A region as it is written in Python.

    Example:
        >>> write_region(((0, 4), (2, 8))), write_region(())
        ('[0:4, 2:8]', '[]')
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in region)}]"


def plan_parts(
    held: Mapping[str, Held],
    wanted: Mapping[str, Region],
    *,
    destination: int = 0,
) -> dict[str, tuple[PlannedPart, ...]]:
    """Plan which source sends which part of each wanted region.

    Every element comes from exactly one source. Sources that hold the same region take turns:
    each part comes from the one that this destination takes the fewest elements from, and
    destinations begin with different ones.

    Args:
        held: for each tensor, the ranks of sources, each with the region that it holds. Regions of
            one tensor are equal or have no element in common.
        wanted: for each tensor, the region that the destination wants.
        destination: the id of the worker.

    Raises:
        LayoutMismatchError: a tensor that no source holds, regions that overlap, or elements that
            no source has; tensor, ranks and regions are in the message.

    Example:
        >>> rows = [(0, ((0, 2), (0, 4))), (1, ((2, 4), (0, 4)))]
        >>> for part in plan_parts({"weight": rows}, {"weight": ((0, 4), (0, 2))})["weight"]:
        ...     print(part)
        PlannedPart(source=0, region=((0, 2), (0, 2)))
        PlannedPart(source=1, region=((2, 4), (0, 2)))
    """
    known: dict[tuple[Region, tuple[tuple[int, Region], ...]], _Geometry] = {}
    taken: dict[int, int] = defaultdict(int)
    parts: dict[str, tuple[PlannedPart, ...]] = {}
    problems: list[str] = []
    for name, region in wanted.items():
        if name not in held:
            problems.append(f"{name!r} is held by no rank")
            continue
        key = region, tuple(held[name])
        geometry = known.get(key)
        if geometry is None:
            geometry = known[key] = _Geometry(region, key[1], destination)
        problems += [problem.format(name) for problem in geometry.problems]
        parts[name] = geometry.choose(taken)
    if problems:
        shown = problems[:_SHOWN]
        if len(problems) > _SHOWN:
            shown.append(f"… and {len(problems) - _SHOWN} more")
        raise LayoutMismatchError(
            "the shards of the trainer do not make up the tensors that are wanted; nothing was "
            "written:\n  " + "\n  ".join(shown)
        )
    return parts


class _Geometry:
    """The parts of a wanted region, each with the sources that hold it.

    Args:
        wanted: the region that is wanted.
        held: ranks with the regions that they hold.
        destination: the id of the worker.
    """

    def __init__(self, wanted: Region, held: Held, destination: int) -> None:
        #: The problems found; ``{!r}`` stands for the name of the tensor.
        self.problems: list[str] = []
        holders: dict[Region, list[int]] = defaultdict(list)
        for rank, region in held:
            if len(region) != len(wanted):
                self.problems.append(
                    f"{{!r}} has {len(region)} dimensions on rank {rank}, and {len(wanted)} where "
                    "it is wanted"
                )
                return
            if size_of(region):
                holders[region].append(rank)
        self.problems += _overlaps(holders)
        # Destinations that want the same begin with different replicas.
        self._parts = [
            (part, _rotated(sorted(ranks), destination), size_of(part))
            for region, ranks in holders.items()
            if (part := intersect(region, wanted)) is not None
        ]
        if not self.problems and size_of(wanted):
            self.problems += self._gap(wanted)
        #: The same for every tensor, where there is nothing to choose.
        self._fixed: tuple[PlannedPart, ...] | None = None
        if all(len(ranks) == 1 for _, ranks, _ in self._parts):
            self._fixed = tuple(PlannedPart(ranks[0], part) for part, ranks, _ in self._parts)

    def choose(self, taken: dict[int, int]) -> tuple[PlannedPart, ...]:
        """Return the parts, each from the source of which the fewest elements are taken so far."""
        if self.problems:
            return ()
        chosen = []
        for region, ranks, size in self._parts:
            source = ranks[0] if len(ranks) == 1 else min(ranks, key=taken.__getitem__)
            taken[source] += size
            if self._fixed is None:
                chosen.append(PlannedPart(source, region))
        return self._fixed or tuple(chosen)

    def _gap(self, wanted: Region) -> list[str]:
        if sum(size for _, _, size in self._parts) == size_of(wanted):
            return []
        left = [wanted]
        for part, _, _ in self._parts:
            left = [rest for region in left for rest in subtract(region, part)]
        gap = f"no rank holds {write_region(left[0])} of it"
        return [f"{{!r}}: {write_region(wanted)} is wanted, and {gap}"]


def _rotated(ranks: list[int], by: int) -> list[int]:
    first = by % len(ranks)
    return ranks[first:] + ranks[:first]


def _overlaps(holders: Mapping[Region, Sequence[int]]) -> list[str]:
    """Name the first two of some different regions that have an element in common."""
    regions = list(holders)
    if len(regions) < 2:
        return []
    # Only regions that overlap in the dimension that is cut most have to be compared.
    axis = max(range(len(regions[0])), key=lambda axis: len({region[axis] for region in regions}))
    open_ones: list[Region] = []
    for region in sorted(regions, key=lambda region: region[axis]):
        start = region[axis][0]
        open_ones = [other for other in open_ones if other[axis][1] > start]
        for other in open_ones:
            if intersect(other, region) is not None:
                one, two = holders[other][0], holders[region][0]
                both = f"rank {one} holds {write_region(other)} and rank {two} holds"
                return [f"{{!r}}: {both} {write_region(region)}, which overlap and are not equal"]
        open_ones.append(region)
    return []
