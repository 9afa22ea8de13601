"""The layers that rename, fuse, cut and transpose: every name accounted for, values in place."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import ApplyContext, Layout, ModelError, Receiver, Sender, Update, hookimpl
from sync_plugin_std import BFloat16, Float8Blocks, Fuse, Rename, Split, Transpose
from sync_testing import LayerConformance, Loopback


class Block(nn.Module):
    """Attention as trainers have it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)
        for i, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, value + i)


class FusedBlock(nn.Module):
    """The same as engines have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.norm = nn.Linear(4, 8), nn.LayerNorm(4)


PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


def push(sender: Sender, receiver: Receiver) -> None:
    pending = sender.send_async()
    receiver.receive(0)
    pending.wait(0)


@pytest.mark.parametrize("cast_first", [False, True])
def test_an_engine_gets_its_names(cast_first: bool) -> None:
    block = Block(1.0)
    source = nn.ModuleDict({"model": block, "value_head": nn.Linear(4, 1)})
    target = FusedBlock().bfloat16()
    ours = [Rename({"model.*": "*", "value_head.*": None}), Fuse(PARTS)]
    layers = ["bf16", *ours] if cast_first else [*ours, "bf16"]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), target)
        push(sender, receiver)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(1)
        push(sender, receiver)
    weight = torch.cat([block.q_proj.weight, block.k_proj.weight, block.v_proj.weight])
    assert torch.equal(target.qkv_proj.weight, weight.bfloat16())
    assert torch.equal(target.norm.bias, block.norm.bias.bfloat16())


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_a_fused_tensor_is_cut(scheme: str) -> None:
    source, target = FusedBlock(), Block(1.0)
    layers = [Split({"qkv_proj": {"q_proj": 4, "k_proj": 2, "v_proj": 2}}), "bf16"]
    with Sender(scheme, source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), target)
        for _ in range(2):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.normal_()
            pending = sender.send_async()
            receiver.receive(20)
            assert pending.wait().updated == (0,)
    for part, rows in (("q_proj", slice(4)), ("k_proj", slice(4, 6)), ("v_proj", slice(6, 8))):
        for name in ("weight", "bias"):
            sent = getattr(source.qkv_proj, name)[rows]
            sent = sent.bfloat16().float() if name == "weight" else sent
            assert torch.equal(getattr(getattr(target, part), name), sent)


def test_cutting_undoes_fusing() -> None:
    source, target = Block(1.0), Block(100.0)
    layers = [Fuse(PARTS), Split({"qkv_proj": {"q_proj": 4, "k_proj": 2, "v_proj": 2}})]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        push(sender, Receiver(sender.address(0), target))
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_a_matrix_is_transposed(scheme: str) -> None:
    source = {"h.c_attn.weight": torch.randn(3, 5), "h.c_attn.bias": torch.randn(5)}
    target = {"h.c_attn.weight": torch.zeros(5, 3), "h.c_attn.bias": torch.zeros(5)}
    with Sender(scheme, source, num_workers=1, layers=[Transpose("*.c_attn.weight")]) as sender:
        receiver = Receiver(sender.address(0), target)
        for _ in range(2):
            source["h.c_attn.weight"].normal_()
            pending = sender.send_async()
            receiver.receive(20)
            pending.wait()
            assert torch.equal(target["h.c_attn.weight"], source["h.c_attn.weight"].t())
    assert torch.equal(target["h.c_attn.bias"], source["h.c_attn.bias"])


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict(
        {"embed": nn.Linear(2, 3, bias=False), "head": nn.Linear(2, 3, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    return model


def test_a_tied_tensor_is_changed_under_the_names_that_are_given() -> None:
    source = tied()
    target = {
        "rows.weight": torch.zeros(1, 2),
        "others.weight": torch.zeros(2, 2),
        "head.weight": torch.zeros(2, 3),
    }
    layers = [Split({"embed": {"rows": 1, "others": 2}}), Transpose("head.weight")]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        push(sender, Receiver(sender.address(0), target))
    weight = source.state_dict()["embed.weight"]
    assert torch.equal(torch.cat([target["rows.weight"], target["others.weight"]]), weight)
    assert torch.equal(target["head.weight"], weight.t())


def test_tied_tensors_stay_tied() -> None:
    source = tied()
    layer = Rename({"embed.*": "tokens.*", "head.*": "lm_head.*"})
    with Sender(Loopback(), source, num_workers=1, layers=[layer]) as sender:
        assert sender.address(0).layout.aliases == (("lm_head.weight", "tokens.weight"),)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Rename({"norm.*": "*"}), r"no pattern .* matches 'q_proj.weight', .*; add one"),
        (Rename({"*.weight": "w", "*": None}), "'q_proj.weight' and 'k_proj.weight' would both"),
        (Fuse({"qkv": ("q_proj", "k_proj", "o_proj")}), r"\['o_proj'\] are missing"),
        (Fuse({"norm": ("q_proj", "k_proj", "v_proj")}), "'norm.weight' is in the weights"),
        (Split({"norm": {"a": 3, "b": 2}}), r"'norm.weight' has the shape \[4\], .* 5 rows"),
        (Split({"qkv": {"q": 4}}), r"Split finds no \['qkv'\]"),
        (Split({"norm": {"q_proj": 4}}), "both be sent as 'q_proj.weight'"),
        (Rename({"nrom.*": "*", "*": "x.*"}), r"Rename, \('nrom\.\*',\), matches one of 8 names"),
        (Rename({"nrom.*": "*"}, strict=False), r"Rename, \('nrom\.\*',\), matches one of 8 names"),
        (BFloat16("*.bias", "nrom.*"), r"BFloat16, \('nrom\.\*',\), matches one of 8 names"),
        (Float8Blocks("q_proj.w*", "nrom.*"), r"Float8Blocks, \('nrom\.\*',\), matches one of"),
        (Transpose("*.bias"), r"last two dimensions, and 'q_proj.bias' has 1: \[4\]"),
        (Transpose("*.kernel"), r"Transpose finds no tensor for \['\*.kernel'\]"),
    ],
)
def test_a_name_that_is_not_accounted_for_is_an_error_before_anything_is_sent(
    layer: object, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Sender(Loopback(), Block(1.0), num_workers=1, layers=[layer])


def test_names_may_be_left_as_they_are() -> None:
    layer = Rename({"norm.*": "layernorm.*"}, strict=False)
    with Sender(Loopback(), Block(1.0), num_workers=1, layers=[layer]) as sender:
        names = sender.address(0).layout.names
    assert {"layernorm.weight", "q_proj.bias"} < set(names)


def test_a_template_has_no_more_wildcards_than_its_pattern() -> None:
    with pytest.raises(ValueError, match=r"more '\*' than 'model\.\*'"):
        Rename({"model.*": "*.*"})


class EveryMatrix(Transpose):
    """The layer as the conformance suite can take it: workers transpose what comes."""

    def __init__(self) -> None:
        super().__init__("*")

    def _regroup(self, layout: Layout, *, strict: bool) -> dict[str, Any]:
        names = [name for name, i in layout.index.items() if len(layout.specs[i].shape) == 2]
        layer = Transpose(*names) if names else Rename({"*": "*"})
        return layer._regroup(layout, strict=strict)

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        assert context.layout is not None
        update.replace([t.t() if t.dim() == 2 else t for t in update.tensors])
        return (yield)


class TestTranspose(LayerConformance):
    layer = EveryMatrix()
