"""Patches: any two versions of any layout, bit by bit, applied once, twice, or after a skip."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sync_core import Layout, Payload
from sync_core.errors import OptionError, PayloadError, RequirementError
from sync_core.transports import Block
from sync_plugin_scale.increments.compare import Comparer, replace_units
from sync_plugin_scale.increments.patch import (
    Patch,
    checksum,
    padded_nbytes,
    positions_of,
    shorten,
    units_of,
)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.int16,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (1,), (3,), (5, 0), (7, 9), (64, 33), (300, 1001)]


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def random_tensor(dtype: torch.dtype, shape: Sequence[int], random: np.random.Generator) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        most = 2 if dtype == torch.bool else 256
        data = random.integers(0, most, tensor.nbytes, dtype=np.uint8)
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor


def changed(tensor: Tensor, share: float, random: np.random.Generator) -> Tensor:
    """The same bits but for a share of the elements."""
    result = tensor.clone()
    if tensor.numel():
        where = torch.from_numpy(random.random(tensor.numel()) < share)
        other = bits(random_tensor(tensor.dtype, tensor.shape, random))
        rows = result.view(-1).view(torch.uint8).view(tensor.numel(), -1)
        rows[where] = other.view(tensor.numel(), -1)[where]
    return result


def packed(named: Mapping[str, Tensor]) -> tuple[Layout, Block]:
    layout = Layout.of(named)
    block = Block.allocate(padded_nbytes(layout))
    block.memory.zero_()
    payload_of(named, layout).pack(block)
    return layout, block


def payload_of(named: Mapping[str, Tensor], layout: Layout, version: int = 2) -> Payload:
    return Payload(version, layout, [named[spec.name] for spec in layout.specs])


def patch_of(base: int, version: int, digest: str, positions: Any, body: Any) -> Patch:
    gaps = shorten(np.diff(positions, prepend=0))
    return Patch(base, version, digest, checksum(body), len(body), gaps, body[positions])


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), max_size=8),
    tied=st.booleans(),
    transposed=st.booleans(),
    share=st.sampled_from([0.0, 0.001, 0.05, 1.0]),
    seed=st.integers(0, 1 << 30),
    compress=st.sampled_from([None, "zstd"]),
)
def test_a_patch_turns_one_version_into_another(
    *,
    kinds: list[tuple[torch.dtype, tuple[int, ...]]],
    tied: bool,
    transposed: bool,
    share: float,
    seed: int,
    compress: Any,
) -> None:
    random = np.random.default_rng(seed)
    before = {f"t{i}": random_tensor(*kind, random) for i, kind in enumerate(kinds)}
    after = {name: changed(tensor, share, random) for name, tensor in before.items()}
    if transposed:
        after = {k: t.t().contiguous().t() if t.dim() == 2 else t for k, t in after.items()}
    if tied and before:
        before["tied"], after["tied"] = before["t0"], after["t0"]
    layout, old = packed(before)
    new = packed(after)[1]
    body, wanted = units_of(old, layout), units_of(new, layout)
    kept = body.copy()
    found = Comparer(layout).update(kept, payload_of(after, layout), limit=sys.maxsize, keep=True)
    assert found.complete
    assert np.array_equal(kept, wanted)
    assert np.array_equal(found.positions, np.flatnonzero(body != wanted))
    assert np.array_equal(found.before, body[found.positions])
    assert np.array_equal(found.values, wanted[found.positions])
    patch = patch_of(1, 2, layout.digest, found.positions, wanted)
    patch = Patch.from_tensor(patch.to_tensor(compress))
    assert (patch.base, patch.version, patch.digest) == (1, 2, layout.digest)
    for _ in range(2):
        patch.apply(body)
        views = zip(old.views(layout), layout.specs, strict=True)
        assert all(torch.equal(bits(view), bits(after[spec.name])) for view, spec in views)


def test_signs_of_zero_and_kinds_of_nan_are_differences() -> None:
    before = {"w": torch.tensor([0.0, float("nan"), 1e-45, 2.0])}
    after = {"w": torch.tensor([-0.0, float("nan"), 3e-45, 2.0])}
    layout, block = packed(before)
    found = Comparer(layout).update(
        units_of(block, layout), payload_of(after, layout), limit=sys.maxsize
    )
    assert found.positions.tolist() == [0, 2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 1 << 18), unique=True, max_size=30))
@example([254, 255, 509, 510, 65789, 65790, 65791])
@example([65535, 131070])
def test_gaps_lead_to_every_position(positions: list[int]) -> None:
    positions.sort()
    gaps = shorten(np.diff(np.array(positions, np.int64), prepend=0))
    assert positions_of(gaps).tolist() == positions
    assert len(gaps) <= len(positions) + (1 << 18) // 255 + 1


@settings(deadline=None)
@given(st.integers(0, 70), st.sampled_from([1, 2, 4, 8]), st.floats(0, 1), st.integers(0, 99))
def test_differences_of_dense_and_sparse_rows(
    words: int, unit: int, share: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 100, words * 8 // unit).astype(f"u{unit}")
    new = np.where(random.random(len(old)) < share, old + 1, old).astype(old.dtype)
    body = old.copy()
    positions, before, values = replace_units(body, new)
    assert np.array_equal(body, new)
    assert np.array_equal(positions, np.flatnonzero(old != new))
    assert np.array_equal(before, old[positions])
    assert np.array_equal(values, new[positions])


def test_too_many_positions_are_no_difference() -> None:
    layout, block = packed({"w": torch.zeros(1000)})
    comparer, payload = Comparer(layout), payload_of({"w": torch.ones(1000)}, layout)
    for limit in (999, 1000):
        found = comparer.update(units_of(block, layout).copy(), payload, limit)
        assert found.complete == (limit == 1000)


def sample() -> tuple[Patch, np.ndarray[Any, Any]]:
    body = np.arange(64, dtype=np.uint16)
    return patch_of(3, 5, "ab" * 32, np.array([1, 40]), body), body


def test_a_patch_of_another_size_writes_nothing() -> None:
    patch, _ = sample()
    for other in (np.zeros(32, np.uint16), np.zeros(64, np.uint8)):
        with pytest.raises(PayloadError, match="a patch is for a body of 64 uint16"):
            patch.apply(other)
    far = replace(patch, gaps=np.array([1, 200], np.uint8))
    body = np.zeros(64, np.uint16)
    with pytest.raises(PayloadError, match="position 201"):
        far.apply(body)
    assert not body.any()


def test_a_result_with_other_bits_is_found() -> None:
    patch, body = sample()
    body[7] += 1
    with pytest.raises(PayloadError, match="version 5 has the checksum"):
        patch.apply(body)


def test_every_result_is_checked_without_the_hash_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hash of the standard library; a worker without the trainer's hash says what to type."""
    with_library, body = sample()
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(RequirementError, match=r'pip install "sync-plugin-scale\[verify\]"'):
        Patch.from_tensor(with_library.to_tensor()).apply(body.copy())
    patch, body = sample()
    monkeypatch.undo()
    patch = Patch.from_tensor(patch.to_tensor())
    wrong = body.copy()
    wrong[7] += 1
    with pytest.raises(PayloadError, match="version 5 has the checksum"):
        patch.apply(wrong)
    patch.apply(body)


def test_without_the_library_zstd_the_message_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(OptionError, match=r"sync-plugin-scale\[zstd\]"):
        sample()[0].to_tensor("zstd")
