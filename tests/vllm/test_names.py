"""Names of a checkpoint, and those of a model of vLLM that fuses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sync_core.errors import LayoutMismatchError
from sync_plugin_vllm.names import check_names

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
    check_names(SENT, TAKEN, Fused(), quantized=False)


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
        check_names(sent, taken, Fused(), quantized=False)


def test_scales_of_a_quantized_model_need_not_be_sent() -> None:
    model = Fused()
    model.scale = torch.nn.Parameter(torch.ones(1))
    check_names(SENT, TAKEN, model, quantized=True)
