"""The plan of reading what ranks have written: any shapes, placements and regions of readers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sync_core import Layout, LayoutMismatchError, Payload
from sync_core.errors import PayloadError
from sync_core.models import Region
from sync_plugin_scale import HeldTensor, Holding
from sync_plugin_store.chunks import cuts_of, digests_between, read_chunks, write_chunks
from sync_plugin_store.format import File, Piece, digest_of
from sync_plugin_store.holdings import (
    JoinedHoldings,
    Wanted,
    assign,
    file_layout,
    read_holdings,
    write_holdings,
)
from sync_plugin_store.parts import Plan, VersionFile
from sync_plugin_store.pieces import pieces_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def take(tensor: Tensor, region: Region) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in region)]


@st.composite
def placements(draw: Any, shape: tuple[int, ...], size: int) -> list[Region]:
    """A region of each rank: together a grid over the tensor, which may be held several times."""
    every = [tuple((0, n) for n in shape)]
    for axis, n in enumerate(shape):
        cuts = sorted(draw(st.lists(st.integers(0, n), max_size=2)))
        bounds = list(itertools.pairwise([0, *cuts, n]))
        grid = [(*region[:axis], b, *region[axis + 1 :]) for region in every for b in bounds]
        if len(grid) <= size:
            every = grid
    ranks = draw(st.permutations(range(size)))
    found: list[Region] = [((0, 0),) * len(shape)] * size
    for position, rank in enumerate(ranks):
        if position < len(every):
            found[rank] = every[position]
        elif draw(st.booleans()):
            # A replica of another rank's.
            found[rank] = draw(st.sampled_from(every))
        elif not shape:
            found[rank] = ()
    return found


@st.composite
def models(draw: Any) -> tuple[dict[str, Tensor], list[dict[str, Region]]]:
    """Tensors, and the regions that each rank holds."""
    size = draw(st.integers(1, 4))
    tensors, held = {}, [dict[str, Region]() for _ in range(size)]
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        if draw(st.integers(0, 5)) == 0:
            shape = (draw(st.integers(30, 130)), *shape[:1], 64)
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.arange(torch.Size(shape).numel()) + 1 + number
        tensors[f"t{number}"] = values.reshape(shape).to(dtype)
        for rank, region in enumerate(draw(placements(shape, size))):
            held[rank][f"t{number}"] = region
    return tensors, held


def holdings_of(tensors: dict[str, Tensor], held: list[dict[str, Region]]) -> list[Holding]:
    return [
        Holding(
            rank,
            len(held),
            tuple(
                HeldTensor(name, tensors[name].dtype, region, tuple(tensors[name].shape))
                for name, region in regions.items()
            ),
        )
        for rank, regions in enumerate(held)
    ]


def written(holding: Holding, tensors: dict[str, Tensor], piece: int) -> tuple[VersionFile, bytes]:
    """The file of a rank as a reader sees it, and its body."""
    layout = file_layout(holding)
    parts = [take(tensors[t.name], t.region).contiguous() for t in holding.tensors]
    pieces = list(pieces_of(Payload(1, layout, parts), piece))
    cuts, start, entries = cuts_of(layout), 0, []
    for each in pieces[1:]:
        entries += digests_between(each, start, cuts)
        start += len(each)
    file = File(tuple(Piece(digest_of(each), len(each)) for each in pieces))
    read = Layout.from_header(bytes(pieces[0]))
    return VersionFile(read, read_chunks(write_chunks(entries), file)), b"".join(pieces[1:])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), model=models(), piece=st.sampled_from([64, 1000, 1 << 20]))
def test_any_reader_gets_its_bits_from_any_ranks(data: Any, model: Any, piece: int) -> None:
    tensors, held = model
    joined = assign(holdings_of(tensors, held))
    assert JoinedHoldings.from_bytes(joined.to_bytes()).layout == joined.layout
    assert {s.name: (s.dtype, s.shape) for s in joined.layout.specs} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    # Each element is written once.
    for name, tensor in tensors.items():
        count = torch.zeros(tensor.shape, dtype=torch.int64)
        for rank in joined.ranks:
            for each in rank.tensors:
                if each.name == name:
                    take(count, each.region).add_(1)
        assert (count == 1).all()
    files = [written(holding, tensors, piece) for holding in joined.ranks]
    wanted = []
    for name, tensor in tensors.items():
        region = tuple(
            tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
            for n in tensor.shape
        )
        wanted.append(Wanted(f"part of {name}", name, region, tuple(tensor.shape)))
    for some in (wanted, list(joined.everything())):
        copies = joined.copies(some)
        needed = sorted({0, *(each.file for each in copies)})
        kinds = [(w.view, tensors[w.name].dtype, tuple(b - a for a, b in w.region)) for w in some]
        plan = Plan({number: files[number][0] for number in needed}, kinds, copies)
        for read in plan.ranges:
            read.take(memoryview(files[read.file][1])[read.start : read.stop])
        views = plan.block.views(plan.layout)
        for w, view in zip(some, views, strict=True):
            assert torch.equal(view, take(tensors[w.name], w.region)), w


def of_two(*regions: Region, shape: tuple[int, ...] | None = (8, 4)) -> list[Holding]:
    return [
        Holding(i, len(regions), (HeldTensor("weight", torch.float32, region, shape),))
        for i, region in enumerate(regions)
    ]


ROWS = ((0, 4), (0, 4)), ((4, 8), (0, 4))


def test_ranks_that_hold_no_whole_model_are_named() -> None:
    with pytest.raises(LayoutMismatchError, match=r"'weight'.*no rank holds \[4:5, 0:4\]"):
        assign(of_two(ROWS[0], ((5, 8), (0, 4))))
    with pytest.raises(LayoutMismatchError, match=r"'weight'.*rank 0.*rank 1.*overlap"):
        assign(of_two(ROWS[0], ((3, 8), (0, 4))))
    first, second = of_two(*ROWS)
    other = replace(second.tensors[0], dtype=torch.bfloat16)
    with pytest.raises(LayoutMismatchError, match=r"'weight' is float32.*bfloat16.*on rank 1"):
        assign([first, replace(second, tensors=(other,))])
    other = replace(second.tensors[0], shape=(9, 4))
    with pytest.raises(LayoutMismatchError, match=r"'weight' is as a whole \[8, 4\] on rank 0"):
        assign([first, replace(second, tensors=(other,))])


def test_a_list_of_parts_that_contradicts_itself_is_refused() -> None:
    beyond = b'[["weight","float32",[[4,9],[0,4]],[8,4]]]'
    good = assign(of_two(*ROWS)).to_bytes()
    assert JoinedHoldings.from_bytes(good).layout.body_nbytes == 128
    for wrong, message in (
        (good.replace(b"[[4,8],[0,4]]", b"[[5,8],[0,4]]"), r"'weight'.*no rank holds \[4:5"),
        (good.replace(b"[[4,8],[0,4]]", b"[[3,8],[0,4]]"), r"'weight'.*overlap"),
        (good.replace(b'[["weight","float32",[[4,8],[0,4]],[8,4]]]', beyond), "'weight' has no"),
        (good.replace(b'"rank":1', b'"rank":0'), "is of other ranks"),
        (good.replace(b'"size":2', b'"size":3'), "is of other ranks"),
        (b"[]", "of 0 ranks"),
        (b"{}", "of 0 ranks"),
        (b"[" * 100_000, "not the parts of ranks"),
        (b"\xff", "not the parts of ranks"),
        (good.replace(b"float32", b"Tensor"), "not the parts of ranks"),
    ):
        with pytest.raises(PayloadError, match=message):
            JoinedHoldings.from_bytes(wrong)
    assert write_holdings(read_holdings(good)) == good


def test_the_file_of_a_rank_must_have_what_the_manifest_says() -> None:
    joined = assign(of_two(*ROWS))
    tensors = {"weight": torch.arange(32.0).reshape(8, 4)}
    files = [written(holding, tensors, 1000) for holding in joined.ranks]
    copies = joined.copies(joined.everything())
    kinds = [("weight", torch.float32, (8, 4))]
    swapped = {"weight": tensors["weight"].double()}
    other = assign(
        [
            replace(h, tensors=tuple(replace(t, dtype=torch.float64) for t in h.tensors))
            for h in joined.ranks
        ]
    )
    wrong = written(other.ranks[1], swapped, 1000)[0]
    with pytest.raises(PayloadError, match=r"file 1 of the version has weight: float64\[4, 4\]"):
        Plan({0: files[0][0], 1: wrong}, kinds, copies)
    short = VersionFile(files[1][0].layout, read_chunks(None, File((Piece("0" * 64, 64),))))
    with pytest.raises(PayloadError, match="needs 64 bytes, and has 0"):
        Plan({0: files[0][0], 1: short}, kinds, copies)
