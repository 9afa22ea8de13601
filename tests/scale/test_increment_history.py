"""The history of increments, against a model that keeps every version whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sync_core import Layout, OptionError, Payload
from sync_plugin_scale import Increments
from sync_plugin_scale.increments.history import IncrementHistory, PackedVersion
from sync_plugin_scale.increments.patch import Patch

KINDS = {
    "a": torch.bfloat16,
    "b": torch.float32,
    "flag": torch.bool,
    "scalar": torch.float64,
    "empty": torch.int8,
}
SHAPES = {"a": (40, 30), "b": (7,), "flag": (5,), "scalar": (), "empty": (0,)}


class Model:
    """Keeps every version, and says what a history must and may know of it."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.weights = {
            name: torch.zeros(SHAPES[name], dtype=dtype) for name, dtype in KINDS.items()
        }
        self.versions: dict[int, dict[str, Tensor]] = {}
        self.history = IncrementHistory(below=0.3)
        # Versions before these have another layout, were forgotten, or differ everywhere.
        self.base_from = self.known_from = 1

    def change(self, share: float) -> None:
        for tensor in self.weights.values():
            data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
            if tensor.numel():
                where = torch.from_numpy(self.random.random(data.numel()) < share)
                data ^= where.to(torch.uint8)

    def reshape(self) -> None:
        rows = 41 if self.weights["a"].shape[0] == 40 else 40
        self.weights["a"] = torch.ones(rows, 30, dtype=torch.bfloat16)

    def record(self, *, keep: bool) -> None:
        version = len(self.versions) + 1
        layout = Layout.of(self.weights)
        tensors = [self.weights[spec.name] for spec in layout.specs]
        self.history.record(Payload(version, layout, tensors), keep=keep)
        self.versions[version] = {name: t.clone() for name, t in self.weights.items()}
        if not keep:
            self.known_from = version

    def packed(self, version: int) -> PackedVersion:
        weights = self.versions[version]
        layout = Layout.of(weights)
        packed = PackedVersion.allocate(layout)
        packed.pack(Payload(version, layout, [weights[spec.name] for spec in layout.specs]))
        return packed


def check_increments(model: Model) -> None:
    """Every increment leads from each version since its base to the newest, twice as well."""
    newest = len(model.versions)
    wanted = model.packed(newest)
    for base in range(newest + 1):
        patch = model.history.since(base)
        if patch is None:
            continue
        assert base > 0
        assert patch.nbytes < 0.3 * wanted.body.nbytes
        patch = Patch.from_tensor(patch.to_tensor())
        for held in range(base, newest + 1):
            packed = model.packed(held)
            patch.apply(packed.body)
            patch.apply(packed.body)
            assert np.array_equal(packed.body, wanted.body)


def check_versions(model: Model) -> None:
    """The history returns the right bits of a version, and knows those that it had to keep."""
    for version, weights in model.versions.items():
        payload = model.history.at(version)
        if payload is None:
            assert version < model.known_from
            continue
        assert Patch.from_tensor(payload.tensors[-1]).version == version
        tensors = zip(payload.layout.specs[:-1], payload.tensors, strict=False)
        for spec, tensor in tensors:
            assert torch.equal(tensor, weights[spec.name]), (version, spec.name)


STEPS = st.one_of(
    st.tuples(st.just("record"), st.sampled_from([0.0, 0.001, 0.01, 1.0]), st.booleans()),
    st.tuples(st.just("reshape"), st.just(0.0), st.booleans()),
    st.tuples(st.just("interrupt"), st.just(0.0), st.booleans()),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=7))
def test_any_order_of_versions(steps: list[tuple[str, float, bool]]) -> None:
    model = Model()
    for step, share, keep in steps:
        model.change(share)
        if step == "reshape":
            model.reshape()
        if step == "interrupt":
            interrupt(model)
            model.known_from = len(model.versions) + 1
        model.record(keep=keep and step != "interrupt")
        check_increments(model)
        check_versions(model)


def interrupt(model: Model) -> None:
    """Record a version whose tensors cannot be read."""
    layout = Layout.of(model.weights)
    broken = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in layout.specs]
    with pytest.raises((RuntimeError, NotImplementedError)):
        model.history.record(Payload(len(model.versions) + 1, layout, broken))
    assert model.history.since(len(model.versions)) is None


def test_what_no_worker_needs_is_forgotten() -> None:
    model = Model()
    for _ in range(4):
        model.change(0.001)
        model.record(keep=True)
    model.history.forget(held=3, wanted=4)
    assert model.history.since(3) is not None
    assert model.history.since(2) is None
    assert model.history.at(3) is not None
    assert model.history.at(2) is None


def test_positions_take_a_sixteenth_of_the_memory_and_old_values_one_copy() -> None:
    model = Model()
    for _ in range(60):
        model.change(0.01)
        model.record(keep=True)
        model.history.forget(held=0, wanted=0)
    whole = model.packed(1).body.nbytes
    positions = sum(c.gaps.nbytes for c in model.history._changes if c.gaps is not None)
    assert positions <= whole / 16
    assert sum(change.values_nbytes for change in model.history._changes) <= whole
    assert model.history.since(59) is not None
    assert model.history.since(1) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"below": 0}, "below must be a number between 0 and 1, got 0"),
        ({"below": True}, "got True"),
        ({"whole_every": 0}, "whole_every must be an integer >= 1 or None, got 0"),
        ({"whole_every": True}, "got True"),
        ({"compress": "gzip"}, "compress must be 'zstd' or None, got 'gzip'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Increments("shm", **options)  # type: ignore[arg-type]
