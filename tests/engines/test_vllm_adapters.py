"""LoRA adapters by name: each version of a trainer's adapter, in an engine that generates."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.engines import (
    NEW_TOKENS,
    OPTIONS,
    PROMPT,
    Server,
    check_output,
    make_llama,
    reference_logprobs,
)

from sync_core import OptionError, Sender, SendError, SyncError
from sync_plugin_std import lora
from sync_plugin_vllm import VllmTarget

pytestmark = pytest.mark.timeout(600)

MODULES = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        config = WeightTransferConfig(backend="sync_core")
        llm = LLM(
            str(checkpoint),
            weight_transfer_config=config,
            enable_lora=True,
            max_lora_rank=8,
            **OPTIONS,
        )
        yield llm
        llm.shutdown_weight_transfer_engine()


def make_trainer(**options: Any) -> Any:
    """A PEFT model on the weights of the checkpoint."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(**dict(r=4, lora_alpha=8, target_modules=MODULES) | options)
    model = get_peft_model(make_llama(0), config)
    train(model)
    return model


def train(model: Any) -> None:
    """Change the adapter, as a step of an optimiser would, so that it changes the tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)


def merged(model: Any) -> Any:
    """The plain model that a PEFT model stands for."""
    return copy.deepcopy(model).merge_and_unload()


def connected(target: VllmTarget, model: Any, scheme: str = "shm", **options: Any) -> Sender:
    sender = Sender(
        scheme,
        model,
        num_workers=target.num_workers,
        layers=[lora("adapter")],
        strategy="checkpoint",
        timeout=60,
        **options,
    )
    target.connect(sender)
    return sender


def logprobs(llm: Any, request: Any) -> list[float]:
    """Log-probabilities of the prompt, by an engine with an adapter."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    [output] = llm.generate(
        [{"prompt_token_ids": PROMPT}], params, use_tqdm=False, lora_request=request
    )
    found = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return [of[token].logprob for of, token in found]


def check_adapter(llm: Any, target: VllmTarget, model: Any) -> None:
    """Fail unless an engine with the newest adapter computes what the trainer's model does."""
    expected = reference_logprobs(merged(model))
    assert logprobs(llm, target.lora_request()) == pytest.approx(expected, abs=0.1)
    assert logprobs(llm, None) == pytest.approx(reference_logprobs(make_llama(0)), abs=0.1)
    assert logprobs(llm, None) != pytest.approx(expected, abs=0.5)


def directories(parent: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in parent.iterdir())


def test_each_version_is_an_adapter_of_its_own(llm: Any, tmp_path: Path) -> None:
    model = make_trainer()
    target = VllmTarget(llm, adapter="policy", adapter_directory=str(tmp_path))
    with connected(target, model) as sender:
        for version in (1, 2, 3):
            report = target.send()
            assert (report.version, report.updated) == (version, (0,))
            [engine] = target.engines
            assert (engine.state, engine.version) == ("current", version)
            assert engine.adapter == f"policy-v{version}"
            assert sender.workers[0].state == "current"
            check_adapter(llm, target, model)
            # The one before is gone from the engine, with its files.
            assert llm.llm_engine.list_loras() == {target.lora_request().lora_int_id}
            assert directories(tmp_path) == [f"policy-v{version}"]
            train(model)
