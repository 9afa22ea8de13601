"""The layers on tiny models of transformers and PEFT, with tied embeddings and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sync_core import ModelError, ReadbackError, Receiver, Sender, SendError, SendReport
from sync_plugin_std import Lora, Select, fp8, fuse, rename, split, transpose
from sync_testing import Loopback

# Of the libraries, when they are imported and when models are made.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    return model.to(dtype)


def qwen(seed: int, dtype: torch.dtype = torch.float32, *, tie_word_embeddings: bool = True) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tie_word_embeddings))
    return model.to(dtype)


def adapted(model: Any, **options: Any) -> Any:
    """The model under LoRA, with adapters that change it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options)
    peft = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return peft


def push(sender: Sender, receiver: Receiver) -> SendReport:
    pending = sender.send_async()
    receiver.receive(0)
    return pending.wait(0)


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
CUT = {
    "qkv_proj": {"q_proj": 16, "k_proj": 8, "v_proj": 8},
    "gate_up_proj": {"gate_proj": 32, "up_proj": 32},
}
STACKS = {
    "rename": [rename({"*": "engine.*"}), rename({"engine.*": "*"})],
    "fuse, split": [fuse(FUSED), split(CUT)],
    "transpose": [transpose("*.down_proj.weight"), transpose("*.down_proj.*")],
    "select": ["select"],
    "zstd": ["zstd"],
    "all": ["select", rename({"*": "engine.*"}), rename({"engine.*": "*"}), "zstd"],
}


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_a_worker_has_the_trainers_values(make: Any, dtype: torch.dtype, stack: list[Any]) -> None:
    source, target = make(0), make(1, dtype)
    # Frozen but for the last block.
    for name, parameter in source.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    layers = stack if dtype == torch.float32 else [*stack, "bf16"]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), target)
        for _ in range(2):
            with torch.no_grad():
                for parameter in source.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.5)
            push(sender, receiver)
            wanted, found = source.state_dict(), target.state_dict()
            assert all(torch.equal(found[name], wanted[name].to(dtype)) for name in found)
    assert (target.lm_head.weight is target.model.embed_tokens.weight) is (make is qwen)


@pytest.mark.parametrize("make", [llama, qwen])
def test_an_engine_loads_fused_blocks_of_8_bits(make: Any) -> None:
    source = make(0)
    layers = [rename({"model.*": "engine.*", "*": "*"}), fuse(FUSED), fp8(), "bf16"]
    held: dict[str, torch.Tensor] = {}
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        push(sender, Receiver(sender.address(0), load=held.update))
    weights = source.state_dict()
    prefix = "layers.0.self_attn"
    parts = [weights[f"model.{prefix}.{part}.weight"] for part in FUSED["qkv_proj"]]
    blocks = held[f"engine.{prefix}.qkv_proj.weight"]
    assert blocks.dtype == torch.float8_e4m3fn
    scale = held[f"engine.{prefix}.qkv_proj.weight_scale_inv"]
    torch.testing.assert_close(
        blocks.float() * scale.float(), torch.cat(parts), rtol=1 / 15, atol=1e-3
    )
    embedding = weights["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(held["engine.embed_tokens.weight"], embedding)
    assert torch.equal(held["lm_head.weight"], weights["lm_head.weight"].bfloat16())


@pytest.mark.parametrize("make", [llama, qwen])
def test_a_plain_worker_acts_as_the_adapted_model(make: Any) -> None:
    source, target = adapted(make(0)), make(1)
    tokens = torch.arange(8)[None]
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    with Sender(Loopback(), source, num_workers=1, layers=[Lora("merged")]) as sender:
        receiver = Receiver(sender.address(0), target)
        for _ in range(2):
            push(sender, receiver)
            assert all(torch.equal(t, before[name]) for name, t in source.state_dict().items())
            with torch.no_grad():
                torch.testing.assert_close(target(tokens).logits, source(tokens).logits)
                for name, parameter in source.named_parameters():
                    if "lora" in name:
                        parameter.mul_(0.5)
            before = {name: tensor.clone() for name, tensor in source.state_dict().items()}


def test_values_are_those_of_peft() -> None:
    source, target = adapted(llama(0)), llama(1)
    with Sender(Loopback(), source, num_workers=1, layers=[Lora("merged")]) as sender:
        push(sender, Receiver(sender.address(0), target))
    merged = source.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in target.state_dict().items())


def test_merged_for_a_worker_of_16_bits() -> None:
    source, target = adapted(llama(0)), llama(1, torch.bfloat16)
    layers = [Lora("merged"), "bf16"]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        push(sender, Receiver(sender.address(0), target))
    merged = source.merge_and_unload().bfloat16().state_dict()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in target.state_dict().items())


def test_modules_that_are_trained_whole_take_the_place_of_the_original() -> None:
    source, target = adapted(qwen(0), modules_to_save=["lm_head"]), qwen(1)
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if "modules_to_save" in name:
                parameter.fill_(0.5)
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.clone())
    with Sender(Loopback(), source, num_workers=1, layers=[Lora("merged")]) as sender:
        push(sender, Receiver(sender.address(0), target))
    assert torch.equal(target.lm_head.weight, torch.full_like(target.lm_head.weight, 0.5))


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_adapter_alone(make: Any, dtype: torch.dtype) -> None:
    source, target = adapted(make(0)), adapted(make(0)).to(dtype)
    layers = [Lora("adapter"), *([] if dtype == torch.float32 else ["bf16"])]
    whole = sum(tensor.nbytes for tensor in source.parameters())
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), target)
        for _ in range(2):
            with torch.no_grad():
                for name, parameter in source.named_parameters():
                    if "lora" in name:
                        parameter.mul_(0.5)
            assert push(sender, receiver).nbytes < whole / 2
    theirs = source.to(dtype).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in target.state_dict().items())


def test_a_worker_on_another_base_refuses_the_adapter() -> None:
    source, target = adapted(llama(0)), adapted(llama(1))
    with Sender(Loopback(), source, num_workers=1, layers=[Lora("adapter")]) as sender:
        receiver = Receiver(sender.address(0), target)
        pending = sender.send_async()
        with pytest.raises(ReadbackError, match=r"base_model.*start this worker with the trainer"):
            receiver.receive(0)
        with pytest.raises(SendError, match="start this worker with the trainer's checkpoint"):
            pending.wait(0)


def test_the_adapters_follow_a_whole_version() -> None:
    source, target = adapted(llama(0)), adapted(llama(1))
    layer = Select("*.lora_*", "*.modules_to_save.*")
    with Sender(Loopback(), source, num_workers=1, layers=[layer]) as sender:
        receiver = Receiver(sender.address(0), target)
        whole = push(sender, receiver).nbytes
        with torch.no_grad():
            for name, parameter in source.named_parameters():
                if "lora" in name:
                    parameter.mul_(0.5)
        assert push(sender, receiver).nbytes < whole / 4
    theirs = source.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in target.state_dict().items())


def test_what_cannot_be_merged_says_what_to_type() -> None:
    with pytest.raises(ModelError, match="merge_adapter"):
        Sender(Loopback(), adapted(llama(0), use_dora=True), num_workers=1, layers=[Lora("merged")])
    with pytest.raises(ModelError, match="get_peft_model"):
        Sender(Loopback(), llama(0), num_workers=1, layers=[Lora("merged")])
    with pytest.raises(ModelError, match="get_peft_model"):
        Sender(Loopback(), llama(0), num_workers=1, layers=[Lora("adapter")])
    weights = dict(adapted(llama(0)).state_dict())
    with pytest.raises(ModelError, match="PEFT model itself"):
        Sender(Loopback(), weights, num_workers=1, layers=[Lora("merged")])
    with pytest.raises(ValueError, match="sends 'adapter' or 'merged', not 'base'"):
        Lora("base")  # type: ignore[arg-type]
