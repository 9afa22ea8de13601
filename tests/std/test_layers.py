"""The standard layers: values sent and received, and skipped workers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn

import sync_plugin_std
from sync_core import Receiver, Sender, SendError, Update, hookimpl, registry
from sync_core.errors import PayloadError
from sync_plugin_std import (
    BFloat16,
    Fuse,
    Interval,
    Rename,
    Select,
    Split,
    fuse,
    keep,
    rename,
    zstd,
)
from sync_testing import LayerConformance, LayerPairConformance, Negated


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.halved = nn.Parameter(torch.randn(4).half())
        self.brain = nn.Parameter(torch.randn(4).bfloat16())
        self.register_buffer("steps", torch.tensor(3))
        self.tied = self.weight


def send_once(layers: list[Any], source: nn.Module, target: nn.Module, **options: Any) -> int:
    with Sender("thread", source, num_workers=1, layers=layers, **options) as sender:
        receiver = Receiver(sender.address(0), target)
        pending = sender.send_async()
        receiver.receive()
        return pending.wait().nbytes


@pytest.mark.parametrize("zero_copy", [False, True])
def test_what_was_cast_in_inference_mode_can_be_trained(zero_copy: bool) -> None:
    source, target = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.inference_mode():
        send_once(["bf16"], source, target, zero_copy=zero_copy)
    assert not target.weight.is_inference()
    target(torch.ones(1, 4)).sum().backward()
    assert target.weight.grad is not None


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copy", "zero_copy"])
@pytest.mark.parametrize(("layer", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_the_bytes_travel_and_the_dtypes_come_back(
    layer: str, dtype: torch.dtype, zero_copy: bool
) -> None:
    source, target = Mixed(), Mixed()
    plain = send_once([], source, Mixed())
    assert send_once([layer], source, target, zero_copy=zero_copy) < plain
    assert target.weight.dtype == torch.float32
    assert torch.equal(target.weight, source.weight.to(dtype).float())
    assert torch.equal(target.halved, source.halved)
    assert torch.equal(target.brain, source.brain)
    assert target.get_buffer("steps") == 3


def test_layers_by_name_and_by_object() -> None:
    source, target = Mixed(), Mixed()
    send_once([BFloat16(), Interval(1)], source, target)
    assert torch.equal(target.weight, source.weight.bfloat16().float())


def test_a_layer_with_arguments_can_be_called_by_its_name() -> None:
    named = {entry.name: entry.load() for entry in registry.installed(registry.LAYERS)}
    without = {"finite", "interval", "metrics", "checksum", "readback", "given", "held", "left-out"}
    for name in named.keys() - without:
        assert getattr(sync_plugin_std, name) is named[name]


def test_a_stack_of_layers_by_their_names() -> None:
    source = nn.ModuleDict({"model": nn.ModuleDict({n: nn.Linear(4, 4) for n in ("q", "k")})})
    target = nn.ModuleDict({"qk": nn.Linear(4, 8)}).bfloat16()
    layers = [rename({"model.*": "*"}), fuse({"qk": ("q", "k")}), "bf16", zstd(level=3)]
    send_once(layers, source, target)
    sent = source.state_dict()
    weights = [sent["model.q.weight"], sent["model.k.weight"]]
    assert torch.equal(target.state_dict()["qk.weight"], torch.cat(weights).bfloat16())


@pytest.mark.parametrize("level", [0, 23, "9", None])
def test_levels_of_compression(level: Any) -> None:
    with pytest.raises(ValueError, match="level must be from 1 to 22"):
        zstd(level)


def test_what_cannot_be_decompressed_is_refused() -> None:
    source, target = nn.Linear(4, 4), nn.Linear(4, 4)
    with Sender("thread", source, num_workers=1, layers=["zstd", Garbled()]) as sender:
        receiver = Receiver(sender.address(0), target)
        pending = sender.send_async()
        with pytest.raises(PayloadError, match="cannot be decompressed"):
            receiver.receive()
        with pytest.raises(SendError, match="cannot be decompressed"):
            pending.wait()


class Garbled:
    """Overwrites what arrives."""

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update) -> Generator[None, bool, bool]:
        update.replace([torch.zeros_like(tensor) for tensor in update.tensors])
        return (yield)


def pushed(k: int, pushes: int) -> list[bool]:
    source = nn.Linear(1, 1)
    with Sender("none", source, num_workers=1, layers=[Interval(k)]) as sender:
        return [bool(sender.send().updated) for _ in range(pushes)]


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, [True] * 6), (2, [True, False] * 3), (3, [True, False, False] * 2)],
)
def test_the_first_push_goes_out_and_then_every_kth(k: int, expected: list[bool]) -> None:
    assert pushed(k, 6) == expected


def test_pushes_are_counted_for_each_worker() -> None:
    with Sender("none", nn.Linear(1, 1), num_workers=2, layers=[Interval(2)]) as sender:
        assert sender.send(worker_ids=0).updated == (0,)
        assert sender.send().updated == (1,)
        assert sender.send(worker_ids=1).skipped == (1,)
        assert sender.send().updated == (0, 1)
        assert sender.version == 3


@pytest.mark.parametrize("k", [0, -1, True, 2.5, "4", None])
def test_intervals_that_are_none(k: Any) -> None:
    with pytest.raises(ValueError, match="counts pushes from 1"):
        Interval(k)


class TestBFloat16(LayerConformance):
    layer = "bf16"
    tolerance = 2**-8


class TestFloat16(LayerConformance):
    layer = "fp16"
    tolerance = 2**-10


class TestInterval(LayerConformance):
    layer = Interval(3)


class TestMetrics(LayerConformance):
    layer = "metrics"


class TestRename(LayerConformance):
    layer = Rename({"*": "*"})


class TestSelect(LayerConformance):
    layer = Select(trainable=True)


class TestSelectWithoutTheRest(LayerConformance):
    layer = Select("*", send_rest=False)


class TestFinite(LayerConformance):
    layer = "finite"


class TestKeep(LayerPairConformance):
    layer = keep("noise")

    def make_source(self, seed: int) -> Any:
        return {"w": torch.full((3,), float(seed)), "noise": torch.full((2,), float(seed))}

    def make_target(self) -> Any:
        return {"w": torch.zeros(3), "noise": torch.full((2,), 7.0)}

    def expected(self, source: Any) -> Any:
        return source | {"noise": torch.full((2,), 7.0)}


class TestChecksum(LayerConformance):
    layer = "checksum"


class TestReadback(LayerConformance):
    layer = "readback"


class TestGiven(LayerConformance):
    layer = "given"


class TestLeftOut(LayerConformance):
    layer = "left-out"


class TestHeld(LayerConformance):
    layer = "held"


class TestZstd(LayerConformance):
    layer = "zstd"


class TestSplit(LayerConformance):
    layer = Split({})


class TestFuse(LayerConformance):
    layer = Fuse({})


class TestNegated(LayerConformance):
    layer = Negated()
