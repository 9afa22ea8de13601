"""The layers Rename and Fuse: every name accounted for, and values where the worker has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sync_core import ModelError, Receiver, Sender
from sync_core.testing.loopback import Loopback
from sync_plugin_std import Fuse, Rename


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


def test_tied_tensors_stay_tied() -> None:
    source = nn.ModuleDict(
        {"embed": nn.Linear(2, 3, bias=False), "head": nn.Linear(2, 3, bias=False)}
    )
    source["head"].weight = source["embed"].weight
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
