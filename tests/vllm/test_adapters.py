"""Descriptions of a PEFT model's adapter for an engine, and adapters that are refused."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sync_core import ModelError, OptionError, gathered
from sync_plugin_vllm import VllmTarget
from sync_plugin_vllm.adapter_model import base_samples, describe_adapter, peft_config, read_sample

#: One name ends like another one.
NAMES = ("q", "a.q", "a.k", "b.a.k")


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(4, 4)
        self.a = torch.nn.ModuleDict({n: torch.nn.Linear(4, 4) for n in "qk"})
        self.b = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"k": torch.nn.Linear(4, 4)})})


def make(**options: Any) -> Any:
    return peft.get_peft_model(Nested(), peft.LoraConfig(**options))


def patterns(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(NAMES), values)


@settings(max_examples=30, deadline=None)
@given(
    rank=st.integers(1, 4),
    alpha=st.integers(1, 9),
    ranks=patterns(st.integers(1, 4)),
    alphas=patterns(st.integers(1, 9)),
    rslora=st.booleans(),
)
def test_the_config_gives_each_module_its_rank_and_scale(
    rank: int, alpha: int, ranks: dict[str, int], alphas: dict[str, int], *, rslora: bool
) -> None:
    model = make(
        r=rank,
        lora_alpha=alpha,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_rslora=rslora,
        target_modules=["q", "k"],
    )
    described = describe_adapter(gathered(model))
    assert described.scaling.keys() == {*NAMES}
    layers = {name: model.base_model.model.get_submodule(name) for name in NAMES}
    config = peft_config({n: layer.r["default"] for n, layer in layers.items()}, described.scaling)
    again = make(**config)
    for name, layer in layers.items():
        other = again.base_model.model.get_submodule(name)
        assert other.r == layer.r
        assert other.scaling["default"] == pytest.approx(layer.scaling["default"])


def trained(name: str) -> Any:
    model = make(target_modules=["q"])
    model.base_model.model.get_parameter(name).requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: make(target_modules=["k"], lora_bias=True), "cannot have lora_bias=True"),
        (lambda: make(target_modules=["k"], bias="lora_only"), "cannot have bias='lora_only'"),
        (lambda: make(target_modules=["k"], modules_to_save=["q"]), "modules_to_save={'q'}|'q'"),
        (lambda: trained("a.k.bias"), r"trains 'base_model\.model\.a\.k\.bias'"),
        (lambda: torch.nn.Sequential(make(target_modules=["k"])), "names begin with"),
        (Nested, r"acts with \[\]"),
        (lambda: {"weight": torch.ones(2)}, r"is a dict; type Sender\(…, peft_model"),
    ],
    ids=["lora_bias", "bias", "saved", "trained", "wrapped", "plain", "tensors"],
)
def test_what_vllm_has_no_place_for_is_named(model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe_adapter(model())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(adapter="a/b"), "adapter must be a name of letters"),
        (dict(adapter=""), "adapter must be a name of letters"),
        (dict(adapter="a", adapter_directory="tmp"), "absolute path"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        VllmTarget([], **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_samples_of_the_base_model_arrive_as_they_are(dtype: torch.dtype) -> None:
    model = make(target_modules=["k"]).to(dtype)
    samples = base_samples(model)
    base = model.unload()
    assert samples.keys() == {name for name, _ in base.named_parameters()}
    for name, parameter in base.named_parameters():
        expected = parameter if parameter.dim() == 1 else parameter[:, 0]
        assert torch.equal(read_sample(*samples[name]), expected)


@pytest.mark.parametrize("sample", [("save", "AAAA"), ("float32", "AAAA"), ("float32", "?")])
def test_what_is_not_a_sample_is_refused(sample: tuple[str, str]) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_sample(*sample)
