"""The layers whose workers have another model than the trainer, on such pairs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.std import test_experts, test_fp8, test_layers, test_rename
from torch import Tensor, nn

from sync_core import registry
from sync_plugin_std import Lora, fuse, rename, split, transpose
from sync_testing import LayerConformance, LayerPairConformance

# Of PEFT, when it is imported and when it makes models.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def net(seed: int) -> nn.ModuleDict:
    """Two projections, with small multiples of 1/8."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 2)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-64, 65, parameter.shape) / 8)
    return model


def fused(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = ("weight", "bias")
    return {f"qk.{part}": torch.cat([weights[f"q.{part}"], weights[f"k.{part}"]]) for part in parts}


class Pair(LayerPairConformance):
    """Projections as `net` has them, sent to workers with `expected`."""

    def make_source(self, seed: int) -> Any:
        return net(seed)

    def make_target(self) -> Any:
        return {name: torch.zeros_like(t) for name, t in self.expected(self.make_source(0)).items()}


class TestRename(Pair):
    layer = rename({"q.*": "attn.query.*", "*": "attn.*"})

    def expected(self, source: nn.Module) -> Mapping[str, Tensor]:
        weights = source.state_dict()
        names = {name: name.replace("q.", "query.") for name in weights}
        return {f"attn.{name}": weights[old] for old, name in names.items()}


class TestFuse(Pair):
    layer = fuse({"qk": ("q", "k")})

    def expected(self, source: nn.Module) -> Mapping[str, Tensor]:
        return fused(source.state_dict())


class TestSplit(Pair):
    layer = split({"qk": {"q": 4, "k": 2}})

    def make_source(self, seed: int) -> Any:
        return fused(net(seed).state_dict())

    def expected(self, source: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            f"{name}.{part}": source[f"qk.{part}"][rows]
            for name, rows in (("q", slice(4)), ("k", slice(4, 6)))
            for part in ("weight", "bias")
        }


class TestTranspose(Pair):
    layer = transpose("k.weight")

    def expected(self, source: nn.Module) -> Mapping[str, Tensor]:
        weights = source.state_dict()
        return weights | {"k.weight": weights["k.weight"].t()}


class Adapted(LayerPairConformance):
    """A PEFT model on one base; its adapters differ by seed."""

    def make_source(self, seed: int) -> Any:
        from peft import LoraConfig, get_peft_model

        # A scale of 2, and products that are exact in float32.
        model = get_peft_model(net(0), LoraConfig(r=2, lora_alpha=4, target_modules=["q"]))
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randint(-8, 9, parameter.shape) / 8)
        return model


class TestLoraMerged(Adapted):
    layer = Lora("merged")

    def make_target(self) -> Any:
        return net(1)

    def expected(self, source: Any) -> Mapping[str, Tensor]:
        merged: Mapping[str, Tensor] = deepcopy(source).merge_and_unload().state_dict()
        return merged


class TestLoraAdapter(Adapted):
    layer = Lora("adapter")

    def make_target(self) -> Any:
        return self.make_source(0)


def test_every_layer_has_a_conformance_class() -> None:
    modules = (
        vars(module).values() for module in (test_layers, test_rename, test_fp8, test_experts)
    )
    found = {
        registry.find(registry.LAYERS, case.layer).object
        for case in (*(value for values in modules for value in values), *globals().values())
        if isinstance(case, type)
        and issubclass(case, LayerConformance | LayerPairConformance)
        and hasattr(case, "layer")
    }
    kinds = {kind for layer in found for kind in type(layer).__mro__}
    installed = {entry.load() for entry in registry.installed(registry.LAYERS)}
    ours = {layer for layer in installed if layer.__module__.startswith("sync_plugin_std.")}
    assert ours <= kinds
    assert len(ours) == 21
