"""Families of models: after a send, an engine computes as one that starts with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engines.engines import (
    change,
    logprobs,
    make_model,
    reference_logprobs,
    with_engine,
)

from sync_core import Sender, SendError, SyncError
from sync_plugin_std import lora, rename, split, unstack
from sync_plugin_vllm import VllmTarget

pytestmark = pytest.mark.timeout(600)

EXPERTS = dict(num_experts_per_tok=2)


def started_and_sent(
    path: Path, model: Any, layers: Sequence[Any], **target: Any
) -> list[list[float]]:
    """Return the tokens of an engine after two sends."""

    def use(llm: Any) -> list[list[float]]:
        found = []
        driven = VllmTarget(llm, **target)
        with Sender(
            "shm", model, num_workers=1, strategy="checkpoint", layers=layers, timeout=60
        ) as sender:
            driven.connect(sender)
            for _ in range(2):
                driven.send()
                assert driven.engines[0].state == "current"
                found.append(logprobs(llm))
        return found

    return with_engine(path, use)


def check_like_a_fresh_engine(
    tmp_path: Path, old: Any, new: Any, layers: Sequence[Any] = (), **target: Any
) -> None:
    old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    expected = reference_logprobs(new)
    assert reference_logprobs(old) != pytest.approx(expected, abs=0.2)
    first, second = started_and_sent(tmp_path / "old", new, layers, **target)
    assert first == second == pytest.approx(expected, abs=0.1)
    assert first == with_engine(tmp_path / "new", logprobs)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma3"])
def test_a_dense_model(tmp_path: Path, family: str, *, tied: bool) -> None:
    options: dict[str, Any] = dict(tie_word_embeddings=tied)
    if family == "Gemma3":
        options["head_dim"] = 32
    old, new = (make_model(family, seed, **options) for seed in (0, 1))
    for _ in range(3):
        change(new)
    check_like_a_fresh_engine(tmp_path, old, new, verify=True)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_experts(tmp_path: Path, family: str) -> None:
    layers: list[Any]
    if family == "Qwen3Moe":
        options = dict(num_experts=4, moe_intermediate_size=32, head_dim=32)
        names = {
            "*.experts.gate_up_proj": "*.experts.#.gate_up_proj.weight",
            "*.experts.down_proj": "*.experts.#.down_proj.weight",
        }
        layers = [unstack(names), split({"gate_up_proj": {"gate_proj": 32, "up_proj": 32}})]
    else:
        options = dict(num_local_experts=4)
        names = {
            "*.mlp.experts.gate_up_proj": "*.block_sparse_moe.experts.#.w13.weight",
            "*.mlp.experts.down_proj": "*.block_sparse_moe.experts.#.w2.weight",
        }
        gates = {"*.mlp.gate.weight": "*.block_sparse_moe.gate.weight"}
        layers = [
            unstack(names),
            split({"w13": {"w1": 256, "w3": 256}}),
            rename(gates, strict=False),
        ]
    old, new = (make_model(family, seed, **options, **EXPERTS) for seed in (0, 1))
    for _ in range(3):
        change(new)
    check_like_a_fresh_engine(tmp_path, old, new, layers)


def test_a_layer_that_is_not_packed_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (make_model("Llama", seed, tie_word_embeddings=True) for seed in (0, 1))
    old.save_pretrained(tmp_path)

    def use(llm: Any) -> None:
        target = VllmTarget(llm, verify=True)
        with Sender("shm", new, num_workers=1, strategy="checkpoint", timeout=60) as sender:
            target.connect(sender)
            with monkeypatch.context() as patch:
                patch.setattr("sync_plugin_vllm.reload._tied_layers", lambda model: [])
                with pytest.raises(SendError, match=r"sent, in 'lm_head\.weight'"):
                    target.send()
            assert sender.workers[0].state == "bad"
            assert target.engines[0].version is None
            target.send()
            assert target.engines[0].version == 2
        assert logprobs(llm) == pytest.approx(reference_logprobs(new), abs=0.1)

    with_engine(tmp_path, use)


def test_an_engine_that_takes_adapters(tmp_path: Path) -> None:
    old, new = (make_model("Llama", seed, tie_word_embeddings=True) for seed in (0, 1))
    old.save_pretrained(tmp_path)

    def use(llm: Any) -> list[float]:
        target = VllmTarget(llm, verify=True)
        with Sender("shm", new, num_workers=1, strategy="checkpoint", timeout=60) as sender:
            target.connect(sender)
            target.send()
        return logprobs(llm)

    computed = with_engine(tmp_path, use, enable_lora=True, max_lora_rank=8)
    assert computed == pytest.approx(reference_logprobs(new), abs=0.1)


def test_an_engine_that_takes_no_adapters(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    make_model("Llama", 0).save_pretrained(tmp_path)
    model = get_peft_model(make_model("Llama", 0), LoraConfig(target_modules=["q_proj"]))

    def use(llm: Any) -> None:
        target = VllmTarget(llm, adapter="policy")
        layers = [lora("adapter")]
        with Sender("shm", model, num_workers=1, strategy="checkpoint", layers=layers) as sender:
            with pytest.raises(SyncError, match="takes no adapters; start it with enable_lora=T"):
                target.connect(sender)
            with pytest.raises(SyncError, match=r"for an adapter VllmTarget\(…, adapter="):
                VllmTarget(llm).connect(sender)

    with_engine(tmp_path, use)
