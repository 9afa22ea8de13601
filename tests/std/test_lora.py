"""The layer Lora on what users train with PEFT: equal workers, or an error that names what."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.std.test_language_models import SIZES, llama, push, qwen
from torch import nn

from sync_core import (
    LayoutMismatchError,
    ModelError,
    ReadbackError,
    Receiver,
    Sender,
    SendError,
    gathered,
)
from sync_plugin_std import fp8, fuse, lora, rename, transpose
from sync_testing import Loopback

# Of the libraries, when they are imported and when models are made.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TOKENS = torch.arange(8)[None]


def adapted(base: nn.Module, **options: Any) -> Any:
    """The model under LoRA, with adapters that change it."""
    from peft import LoraConfig, get_peft_model

    common: dict[str, Any] = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config = LoraConfig(**common | options)
    return trained(get_peft_model(deepcopy(base), config))


def trained(model: Any) -> Any:
    torch.manual_seed(1)
    parts = ("lora_", "modules_to_save", "trainable_tokens", "ia3_")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts) or parameter.requires_grad:
                parameter.normal_(0, 0.3)
    return model.eval()


def biased() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))
    return model.eval()


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model: Any = MixtralForCausalLM(config)
    return model.eval()


def gptoss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=4)
    model: Any = GptOssForCausalLM(config)
    return model.eval()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=4))
    return model.eval()


def push_once(source: Any, target: Any, layers: list[Any]) -> None:
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        push(sender, Receiver(sender.address(0), target))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (
            biased,
            {
                "target_modules": ["q_proj", "v_proj"],
                "use_rslora": True,
                "rank_pattern": {"v_proj": 3},
                "alpha_pattern": {"v_proj": 5},
                "bias": "all",
            },
        ),
        (biased, {"lora_bias": True}),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        (mixtral, {"target_parameters": EXPERTS}),
        (mixtral, {"target_modules": [], "target_parameters": EXPERTS[:1]}),
        (gptoss, {"target_parameters": EXPERTS}),
        (mixtral, {"modules_to_save": ["lm_head", "norm"]}),
    ],
    ids=["rslora", "lora_bias", "conv1d", "experts", "one of the experts", "turned", "whole"],
)
def test_a_plain_worker_acts_as_the_trainer(
    make: Callable[[], Any], options: dict[str, Any]
) -> None:
    base = make()
    policy = adapted(base, **options)
    with Sender(Loopback(), policy, num_workers=1, layers=[lora("merged")]) as sender:
        push(sender, Receiver(sender.address(0), base))
    torch.testing.assert_close(logits(base), logits(policy))
    assert not torch.allclose(logits(make()), logits(policy))


class Net(nn.Module):
    """Projections whose adapters are quickly made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.k(self.q(x).tanh()).tanh())  # type: ignore[no-any-return]


def two_adapters() -> Any:
    """A policy and a reference on one base: other targets, ranks, scales and heads."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q", "k"], modules_to_save=["head"], lora_bias=True)
    policy = get_peft_model(Net(), config, adapter_name="a")
    other = LoraConfig(r=3, lora_alpha=9, target_modules=["k"], modules_to_save=["head"])
    policy.add_adapter("b", other)
    policy.set_adapter("a")
    return trained(policy)


def scale(policy: Any) -> None:
    for module in policy.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(1.5)


STEPS: dict[str, Callable[[Any], object]] = {
    "a": lambda policy: policy.set_adapter("a"),
    "b": lambda policy: policy.set_adapter("b"),
    "scale": scale,
    "merge": lambda policy: policy.merge_adapter(),
    "unmerge": lambda policy: policy.unmerge_adapter(),
    "train": trained,
}


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), max_size=6))
def test_each_send_follows_what_acts_in_the_trainer(steps: list[tuple[str, bool]]) -> None:
    policy, target, x = two_adapters(), Net(), torch.randn(3, 4)
    with Sender(Loopback(), policy, num_workers=1, layers=[lora("merged")]) as sender:
        receiver = Receiver(sender.address(0), target)
        for step, disabled in [("train", False), *steps]:
            STEPS[step](policy)
            merged = any(getattr(module, "merged", False) for module in policy.modules())
            with policy.disable_adapter() if disabled else nullcontext():
                if merged and disabled:
                    with pytest.raises(ModelError, match="merged and disabled; type"):
                        sender.send_async()
                    continue
                push(sender, receiver)
                torch.testing.assert_close(target(x), policy(x))


def aloras(base: nn.Module) -> Any:
    return adapted(base, alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")


def attention() -> Any:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x)[0]  # type: ignore[no-any-return]

    return Attention().eval()


def convolution() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(36, 2)).eval()


def ia3(base: nn.Module) -> Any:
    from peft import IA3Config, get_peft_model

    return trained(
        get_peft_model(deepcopy(base), IA3Config(target_modules=["q"], feedforward_modules=[]))
    )


@pytest.mark.parametrize(
    ("make", "adapt", "inputs"),
    [
        (llama, lambda m: adapted(m, use_dora=True), TOKENS),
        (llama, lambda m: adapted(m, target_modules=["embed_tokens", "q_proj"]), TOKENS),
        (llama, lambda m: adapted(m, trainable_token_indices=[1, 2]), TOKENS),
        (convolution, lambda m: adapted(m, r=4, target_modules=["0"]), torch.ones(1, 4, 3, 3)),
        (attention, lambda m: adapted(m, target_modules=["attention"]), torch.ones(1, 3, 8)),
        (Net, ia3, torch.ones(1, 4)),
    ],
    ids=["dora", "embedding", "tokens", "convolution", "attention", "ia3"],
)
def test_what_cannot_be_merged_is_named_and_the_advice_leads_to_equal_workers(
    make: Any, adapt: Callable[[Any], Any], inputs: torch.Tensor
) -> None:
    base = (make(0) if make is llama else make()).eval()
    policy = adapt(base)
    with pytest.raises(ModelError, match=r"the adapter 'default' of .* model.merge_adapter\(\)"):
        Sender(Loopback(), policy, num_workers=1, layers=[lora("merged")])

    def output(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: Any = model(inputs)
        return found if isinstance(found, torch.Tensor) else found.logits

    wanted = output(policy)
    policy.merge_adapter()
    with Sender(Loopback(), policy, num_workers=1, layers=[lora("merged")]) as sender:
        push(sender, Receiver(sender.address(0), base))
    torch.testing.assert_close(output(base), wanted)


TIED: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"modules_to_save": ["embed_tokens"]},
]


@pytest.mark.parametrize("options", TIED, ids=["embedding", "head", "saved"])
def test_the_advice_about_tied_embeddings_leads_to_equal_workers(options: dict[str, Any]) -> None:
    """A merge of PEFT into one of two tied tensors changes the other one, too."""
    base = qwen(0).eval()
    with pytest.raises(
        (ModelError, LayoutMismatchError), match=r"tied .*tie_word_embeddings=False"
    ):
        push_once(adapted(base, **options), deepcopy(base), [lora("merged")])
    # As the message says.
    base.config.tie_word_embeddings = False
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.detach().clone())
    policy, worker = adapted(base, **options), qwen(1, tie_word_embeddings=False).eval()
    wanted = logits(policy)
    if "embed_tokens" in options.get("target_modules", ()):
        policy.merge_adapter()
    push_once(policy, worker, [lora("merged")])
    torch.testing.assert_close(logits(worker), wanted)


@pytest.mark.parametrize("options", TIED[:2], ids=["embedding", "head"])
def test_a_merge_into_a_tied_weight_is_logged(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    policy = adapted(qwen(0), **options)
    policy.merge_adapter()
    push_once(policy, qwen(1), [lora("merged")])
    assert caplog.text.count("merging has changed both; before peft.get_peft_model, untie") == 1


def test_what_peft_cannot_merge_is_named() -> None:
    with pytest.raises(ModelError, match=r'cannot merge to workers with PEFT: .*lora\("adapter"\)'):
        Sender(Loopback(), aloras(llama(0)), num_workers=1, layers=[lora("merged")])
    with pytest.raises(ModelError, match=r"q_proj', a Linear with .*lora_B.default.bias"):
        Sender(
            Loopback(), adapted(llama(0), lora_bias=True), num_workers=1, layers=[lora("merged")]
        )


@pytest.mark.parametrize(
    "before",
    [
        "bf16",
        rename({"*": "policy.*"}),
        fuse({"qkv_proj": ("q_proj", "k_proj", "v_proj")}),
        transpose("*.q_proj.base_layer.weight"),
        rename({"*.lora_A.*": None, "*": "*"}),
        fp8("*.q_proj.base_layer.weight"),
    ],
    ids=["bf16", "rename", "fuse", "transpose", "leave out", "fp8"],
)
def test_a_layer_before_the_merge_is_an_error(before: Any) -> None:
    policy = adapted(llama(0), target_modules=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(ModelError, match=r"cannot follow .* put it first: .*lora\(\"merged\"\)"):
        Sender(Loopback(), policy, num_workers=1, layers=[before, lora("merged")])


def push_refused(sender: Sender, receiver: Receiver, message: str) -> None:
    pending = sender.send_async()
    with pytest.raises(ReadbackError, match=message):
        receiver.receive(0)
    with pytest.raises(SendError, match=message):
        pending.wait(0)


@pytest.mark.parametrize(
    ("options", "then"),
    [
        ({"lora_alpha": 16}, None),
        ({"use_rslora": True}, None),
        ({}, lambda worker: worker.base_model.disable_adapter_layers()),
        ({}, lambda worker: worker.merge_adapter()),
        ({"trainable_token_indices": [1, 3]}, None),
        ({"task_type": "CAUSAL_LM", "alora_invocation_tokens": [5]}, None),
    ],
    ids=["alpha", "rslora", "disabled", "merged", "tokens", "alora"],
)
def test_a_worker_whose_adapters_act_otherwise_refuses_them(
    options: dict[str, Any], then: Callable[[Any], object] | None
) -> None:
    tokens = {"trainable_token_indices": [1, 2]} if "trainable_token_indices" in options else {}
    policy, worker = adapted(llama(0), **tokens), adapted(llama(0), **options)
    if then is not None:
        # With B of zeros, the base stays as it is.
        with torch.no_grad():
            for name, parameter in worker.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()
        then(worker)
    with Sender(Loopback(), policy, num_workers=1, layers=[lora("adapter")]) as sender:
        push_refused(sender, Receiver(sender.address(0), worker), "adapters that act otherwise")


def test_a_worker_follows_when_its_adapters_are_switched_alike() -> None:
    policy, worker, x = two_adapters(), two_adapters(), torch.ones(1, 4)
    with Sender(Loopback(), policy, num_workers=1, layers=[lora("adapter")]) as sender:
        receiver = Receiver(sender.address(0), worker)
        push(sender, receiver)
        policy.set_adapter("b")
        push_refused(sender, receiver, r"call set_adapter\(\)")
        worker.set_adapter("b")
        push(sender, receiver)
        assert torch.equal(worker(x), policy(x))


@pytest.mark.parametrize(
    "options",
    [{"bias": "all"}, {"bias": "lora_only"}, {"trainable_token_indices": [1, 2]}],
    ids=str,
)
def test_all_that_peft_trains_travels(options: dict[str, Any]) -> None:
    base = biased()
    policy, worker = adapted(base, **options), adapted(base, **options)
    with Sender(Loopback(), policy, num_workers=1, layers=[lora("adapter")]) as sender:
        receiver = Receiver(sender.address(0), worker)
        for _ in range(2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.1)
            push(sender, receiver)
            assert torch.equal(logits(worker), logits(policy))


@pytest.mark.parametrize("how", ["adapter", "merged"])
def test_adapters_of_a_tied_model_that_is_gathered_travel(how: Any) -> None:
    base = qwen(0)
    policy, worker = adapted(base), adapted(base) if how == "adapter" else deepcopy(base)
    with Sender(Loopback(), gathered(policy), num_workers=1, layers=[lora(how)]) as sender:
        receiver = Receiver(sender.address(0), worker)
        for _ in range(2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.1)
            push(sender, receiver)
            torch.testing.assert_close(logits(worker), logits(policy))
        if how == "adapter":
            with torch.no_grad():
                policy.base_model.model.lm_head.weight.add_(1)
            with pytest.raises(ModelError, match=r"embed_tokens.weight' of the base model was ch"):
                sender.send_async()


def test_a_base_that_changes_is_named() -> None:
    policy = adapted(llama(0))
    with Sender(Loopback(), policy, num_workers=1, layers=[lora("adapter")]) as sender:
        with torch.no_grad():
            policy.base_model.model.lm_head.weight.add_(1)
        with pytest.raises(ModelError, match=r"lm_head.weight' of the base model was changed"):
            sender.send_async()
