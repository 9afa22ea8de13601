"""The plan of shards: against brute force, and against the planner of torch's checkpoints."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from sync_core.errors import LayoutMismatchError
from sync_core.models import Region
from sync_plugin_scale.shards.plan import (
    intersect,
    plan_parts,
    shape_of,
    size_of,
    subtract,
    whole_region,
    write_region,
)

#: What ranks hold, what a worker wants, and the worker's id.
Problem: TypeAlias = tuple[dict[str, list[tuple[int, Region]]], dict[str, Region], int]
SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Regions that make up a tensor: each dimension is cut, some pieces may be empty."""
    cuts = [sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=3))]) for size in shape]
    return list(product(*[list(pairwise(cut)) for cut in cuts]))


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return tuple((start, stop) for start, stop in bounds)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Tensors whose regions are held by one or several ranks, and what a worker wants."""
    held, wanted = {}, {}
    for i in range(draw(st.integers(1, 3))):
        shape = draw(SHAPES)
        ranks = st.sets(st.integers(0, 5), min_size=1, max_size=3)
        entries = [(rank, region) for region in draw(grids(shape)) for rank in draw(ranks)]
        held[f"t{i}"] = draw(st.permutations(entries))
        wanted[f"t{i}"] = draw(regions(shape))
    return held, wanted, draw(st.integers(0, 5))


def elements(region: Region) -> set[tuple[int, ...]]:
    return set(product(*[range(start, stop) for start, stop in region]))


@given(problems())
def test_each_wanted_element_comes_from_one_rank_that_holds_it(problem: Problem) -> None:
    held, wanted, destination = problem
    for name, parts in plan_parts(held, wanted, destination=destination).items():
        taken = [element for part in parts for element in elements(part.region)]
        assert sorted(taken) == sorted(elements(wanted[name])) or not size_of(wanted[name])
        assert len(taken) == len(set(taken))
        for source, region in parts:
            assert any(
                rank == source and intersect(region, box) == region for rank, box in held[name]
            )


@given(problems())
def test_torch_plans_the_same_once_its_duplicates_are_left_out(problem: Problem) -> None:
    held, wanted, _ = problem
    for name, parts in plan_parts(held, wanted).items():
        if not size_of(wanted[name]):
            continue
        boxes = list(dict.fromkeys(region for _, region in held[name] if size_of(region)))
        assert {part.region for part in parts} == torch_plan(boxes, wanted[name])


def torch_plan(boxes: list[Region], want: Region) -> set[Region]:
    public, private = "create_read_items_for_chunk_list", "_create_read_items_for_chunk_list"
    create = getattr(planner_helpers, public, None) or getattr(planner_helpers, private)
    shape = [max(box[axis][1] for box in boxes) for axis in range(len(want))]
    stored = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size(shape),
        chunks=[_chunk(box) for box in boxes],
    )
    found = set()
    for item in create("t", stored, [_chunk(want)]):
        start = [n + int(w[0]) for n, w in zip(item.dest_offsets, want, strict=True)]
        found.add(tuple((a, a + n) for a, n in zip(start, item.lengths, strict=True)))
    return found


def _chunk(region: Region) -> ChunkStorageMetadata:
    offsets = torch.Size([start for start, _ in region])
    return ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(shape_of(region)))


@given(st.data())
def test_what_is_left_of_a_region_and_what_is_taken_make_it_up(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    region, taken = data.draw(regions(shape)), data.draw(regions(shape))
    if not size_of(region) or not size_of(taken):
        return
    left = [element for rest in subtract(region, taken) for element in elements(rest)]
    assert sorted(left) == sorted(elements(region) - elements(taken))


@given(problems(), st.data())
def test_a_gap_is_named(problem: Problem, data: st.DataObject) -> None:
    held, wanted, destination = problem
    name = data.draw(st.sampled_from(sorted(held)))
    gone = data.draw(st.sampled_from([region for _, region in held[name]]))
    held[name] = [(rank, region) for rank, region in held[name] if region != gone]
    common = intersect(gone, wanted[name])
    if not size_of(gone) or common is None:
        assert name in plan_parts(held, wanted)
        return
    with pytest.raises(LayoutMismatchError) as caught:
        plan_parts(held, wanted, destination=destination)
    text = str(caught.value)
    assert f"{name!r}: {write_region(wanted[name])} is wanted" in text
    assert "no rank holds" in text


def test_regions_that_overlap_are_refused_and_named() -> None:
    held = {"w": [(0, ((0, 3), (0, 2))), (1, ((2, 4), (0, 2)))]}
    with pytest.raises(LayoutMismatchError, match=r"rank 0 holds \[0:3, 0:2\] and rank 1 holds"):
        plan_parts(held, {"w": whole_region((4, 2))})


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    with pytest.raises(LayoutMismatchError, match=r"'head\.weight' is held by no rank"):
        plan_parts({}, {"head.weight": ((0, 2),)})


def test_another_number_of_dimensions_is_named() -> None:
    with pytest.raises(LayoutMismatchError, match="'w' has 1 dimensions on rank 3, and 2 where"):
        plan_parts({"w": [(3, ((0, 4),))]}, {"w": whole_region((2, 2))})


def test_replicas_send_equally_much() -> None:
    """HSDP: two replicas of a model on four ranks, and four workers that want all of it."""
    held = {
        f"w{i}": [(rank, ((rank % 2 * 4, rank % 2 * 4 + 4), (0, 8))) for rank in range(4)]
        for i in range(10)
    }
    sent = dict.fromkeys(range(4), 0)
    for worker in range(4):
        parts = plan_parts(held, {name: whole_region((8, 8)) for name in held}, destination=worker)
        here = dict.fromkeys(range(4), 0)
        for found in parts.values():
            for source, region in found:
                here[source] += size_of(region)
        assert len(set(here.values())) == 1
        sent = {rank: sent[rank] + here[rank] for rank in sent}
    assert len(set(sent.values())) == 1


def test_equal_workers_begin_with_different_replicas() -> None:
    held = {"w": [(0, ((0, 4),)), (1, ((0, 4),))]}
    first, second = (
        plan_parts(held, {"w": ((0, 4),)}, destination=i)["w"][0].source for i in (0, 1)
    )
    assert first != second
