"""Names of a checkpoint, and those of a model of vLLM that fuses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sync_core.errors import LayoutMismatchError
from sync_plugin_vllm.names import check_names, check_tied, tied_names

SENT = ["embed.weight", "attn.q_proj.weight", "attn.k_proj.weight", "lm_head.weight"]
TAKEN = ["embed.weight", "attn.qk_proj.weight"]


class Fused(torch.nn.Module):
    packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}
    config = SimpleNamespace(tie_word_embeddings=True)

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(2, 2)
        self.attn = torch.nn.ModuleDict({"qk_proj": torch.nn.Linear(2, 4, bias=False)})


def test_fused_and_tied_names_are_accounted_for() -> None:
    check_names(SENT, TAKEN, Fused(), quantized=False, advice="")


@pytest.mark.parametrize(
    ("sent", "taken", "message"),
    [
        ([*SENT, "norm.weight"], TAKEN, "sent, and not loaded: 'norm.weight'"),
        (SENT[1:], TAKEN, "not sent: 'embed.weight'"),
        ([SENT[0], SENT[1]], TAKEN, "not sent: 'attn.k_proj.weight'"),
        (SENT, TAKEN[:1], "sent, and not loaded: 'attn.q_proj.weight', 'attn.k_proj.weight'"),
    ],
)
def test_what_does_not_fit_is_named(sent: Any, taken: Any, message: str) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        check_names(sent, taken, Fused(), quantized=False, advice="")


def test_scales_of_a_quantized_model_need_not_be_sent() -> None:
    model = Fused()
    model.scale = torch.nn.Parameter(torch.ones(1))
    check_names(SENT, TAKEN, model, quantized=True, advice="")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(2, 2)
        self.lm_head = torch.nn.Linear(2, 2, bias=False)
        self.lm_head.weight = self.embed.weight


def test_tied_tensors_that_were_sent_with_two_values_are_named() -> None:
    model = Tied()
    tied = tied_names(model)
    weight = torch.ones(2, 2)
    for head in (weight, weight.clone()):
        check_tied({"embed.weight": weight, "lm_head.weight": head}, tied, model)
    check_tied({"embed.weight": weight}, tied, model)
    with pytest.raises(LayoutMismatchError, match=r"'lm_head\.weight' and 'embed\.weight' were"):
        check_tied({"embed.weight": weight, "lm_head.weight": weight + 1}, tied, model)


class Experts(torch.nn.Module):
    """Two experts, as vLLM 0.32 holds them."""

    def __init__(self) -> None:
        super().__init__()
        routed = torch.nn.Module()
        routed.w13_weight = torch.nn.Parameter(torch.ones(2, 4, 2))
        self.experts = torch.nn.ModuleDict({"routed_experts": routed})

    def get_expert_mapping(self, *, include_fused: bool = False) -> list[tuple[str, str, int, str]]:
        each = [
            ("experts.w13_", f"experts.{expert}.{part}.", expert, shard)
            for expert in (0, 1)
            for part, shard in (("gate_proj", "w1"), ("up_proj", "w3"))
        ]
        fused = [("experts.w13_weight", "experts.gate_up_proj", i, f"w{1 + 2 * i}") for i in (0, 1)]
        return [*(fused if include_fused else []), *each]


EXPERTS = [f"experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up")]
ROUTED = ["experts.routed_experts.w13_weight"]


def test_each_part_of_each_expert_is_accounted_for() -> None:
    for sent in (EXPERTS, ["experts.gate_up_proj"]):
        check_names(sent, ROUTED, Experts(), quantized=False, advice="")
    for left_out in EXPERTS:
        rest = [name for name in EXPERTS if name != left_out]
        with pytest.raises(LayoutMismatchError, match=f"not sent: '{left_out}'"):
            check_names(rest, ROUTED, Experts(), quantized=False, advice="")


def test_an_engine_that_takes_adapters_has_the_same_names() -> None:
    names = [name.replace(".weight", ".base_layer.weight") for name in TAKEN]
    check_names(SENT, names, Fused(), quantized=False, advice="")
