"""Experts in one tensor, as transformers holds them, and under the names of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sync_core import ModelError, Receiver, Sender
from sync_plugin_std import fp8, fuse, rename, select, split, stack, transpose, unstack
from sync_testing import LayerPairConformance, Loopback

# Of the libraries, when they are imported and when models are made.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EXPERTS, WIDTH = 4, 24


class Experts(LayerPairConformance):
    """One tensor of experts, and one for each."""

    def make_source(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return {"experts.down_proj": torch.randint(-64, 65, (11, 3, 2)) / 8, "norm": torch.ones(3)}

    def make_target(self) -> Any:
        return {name: torch.zeros_like(t) for name, t in self.expected(self.make_source(0)).items()}


class TestUnstack(Experts):
    layer = unstack({"*.down_proj": "*.#.down_proj.weight"})

    def expected(self, source: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        slices = enumerate(source["experts.down_proj"])
        return {"norm": source["norm"]} | {f"experts.{i}.down_proj.weight": t for i, t in slices}


class TestStack(Experts):
    layer = stack({"*.#.down_proj.weight": "*.down_proj"})

    def make_source(self, seed: int) -> Any:
        return dict(TestUnstack().expected(super().make_source(seed)))

    def expected(self, source: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        slices = [source[f"experts.{i}.down_proj.weight"] for i in range(11)]
        return {"norm": source["norm"], "experts.down_proj": torch.stack(slices)}


def sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        **more,
    }


def qwen(seed: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**sizes(num_experts=EXPERTS, moe_intermediate_size=WIDTH, head_dim=4))
    return Qwen3MoeForCausalLM(config).eval()


def mixtral(seed: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**sizes(num_local_experts=EXPERTS))).eval()


TO_QWEN = [
    unstack(
        {
            "*.experts.gate_up_proj": "*.experts.#.gate_up_proj.weight",
            "*.experts.down_proj": "*.experts.#.down_proj.weight",
        }
    ),
    split({"gate_up_proj": {"gate_proj": WIDTH, "up_proj": WIDTH}}),
]
FROM_QWEN = [
    fuse({"gate_up_proj": ("gate_proj", "up_proj")}),
    stack(
        {
            "*.experts.#.gate_up_proj.weight": "*.experts.gate_up_proj",
            "*.experts.#.down_proj.weight": "*.experts.down_proj",
        }
    ),
]
TO_MIXTRAL = [
    unstack(
        {
            "*.mlp.experts.gate_up_proj": "*.block_sparse_moe.experts.#.w13.weight",
            "*.mlp.experts.down_proj": "*.block_sparse_moe.experts.#.w2.weight",
        }
    ),
    split({"w13": {"w1": WIDTH, "w3": WIDTH}}),
    rename({"*.mlp.gate.weight": "*.block_sparse_moe.gate.weight"}, strict=False),
]
FROM_MIXTRAL = [
    fuse({"w13": ("w1", "w3")}),
    stack(
        {
            "*.block_sparse_moe.experts.#.w13.weight": "*.mlp.experts.gate_up_proj",
            "*.block_sparse_moe.experts.#.w2.weight": "*.mlp.experts.down_proj",
        }
    ),
    rename({"*.block_sparse_moe.gate.weight": "*.mlp.gate.weight"}, strict=False),
]


def push(sender: Sender, receiver: Receiver) -> None:
    pending = sender.send_async()
    receiver.receive(0)
    assert pending.wait(0).updated == (0,)


@pytest.mark.parametrize(
    ("make", "there", "back"),
    [(qwen, TO_QWEN, FROM_QWEN), (mixtral, TO_MIXTRAL, FROM_MIXTRAL)],
    ids=["qwen", "mixtral"],
)
def test_an_engine_loads_the_names_of_the_checkpoint_and_they_lead_back(
    make: Any, there: list[Any], back: list[Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    source, target = make(0), make(1)
    source.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    held: dict[str, Tensor] = {}

    def load(weights: Any) -> None:
        held.update((name, tensor.clone()) for name, tensor in weights)

    options: dict[str, Any] = {"num_workers": 1, "strategy": "checkpoint"}
    with Sender(Loopback(), source, layers=there, **options) as sender:
        push(sender, Receiver(sender.address(0), load=load))
    assert held.keys() == written.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in written.items())
    with Sender(Loopback(), held, layers=back, **options) as sender:
        push(sender, Receiver(sender.address(0), target))
    tokens = torch.arange(8)[None]
    assert torch.equal(target(tokens).logits, source(tokens).logits)


def test_experts_of_a_checkpoint_become_those_of_an_engines_kernel() -> None:
    torch.manual_seed(0)
    parts = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    source = {
        f"experts.{i}.{part}.weight": torch.randn(shape)
        for i in range(EXPERTS)
        for part, shape in parts.items()
    }
    target = {"experts.w13": torch.zeros(EXPERTS, 12, 4), "experts.w2": torch.zeros(EXPERTS, 4, 6)}
    layers = [
        fuse({"w13": ("gate_proj", "up_proj")}),
        stack({"*.#.w13.weight": "*.w13", "*.#.down_proj.weight": "*.w2"}),
    ]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        push(sender, Receiver(sender.address(0), target))
    for i in range(EXPERTS):
        gate, up, down = (source[f"experts.{i}.{part}.weight"] for part in parts)
        assert torch.equal(target["experts.w13"][i], torch.cat([gate, up]))
        assert torch.equal(target["experts.w2"][i], down)


def test_a_stack_of_matrices_is_transposed() -> None:
    source, target = {"w": torch.randn(3, 4, 5)}, {"w": torch.zeros(3, 5, 4)}
    with Sender(Loopback(), source, num_workers=1, layers=[transpose("w")]) as sender:
        push(sender, Receiver(sender.address(0), target))
    assert torch.equal(target["w"], source["w"].transpose(1, 2))


WEIGHTS = {
    "experts.0.w": torch.zeros(128, 4),
    "experts.2.w": torch.zeros(128, 4),
    "alike.0.w": torch.zeros(2),
    "alike.1.w": torch.zeros(3),
    "scalar": torch.zeros(()),
}
BLOCKS = [fp8("experts*"), rename({"alike*": None}, strict=False)]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            [stack({"experts.#.w": "w"})],
            "'w' of the numbers 0 to 2, and 1 are missing",
        ),
        ([stack({"alike.#.w": "w"})], r"'w' must be alike, got 'alike.0.w: float32\[2\]"),
        ([stack({"*.#.v": "*.v"})], r"Stack finds no tensor for \['\*.#.v'\]"),
        ([stack({"alike.#.w": "scalar"})], "both be sent as 'scalar'"),
        ([unstack({"*.v": "*.#.v"})], r"Unstack finds no tensor for \['\*.v'\]"),
        ([unstack({"scalar": "scalar.#"})], "'scalar' is a scalar"),
        ([unstack({"alike.0.w": "alike.#.w"})], "both be sent as 'alike.1.w'"),
        ([fuse({"v": ("a", "b")})], r"Fuse finds no part of {'v': \('a', 'b'\)}"),
        ([fp8("*s.0.w"), transpose("experts.0.w")], "Transpose cannot follow one that quantises"),
        ([*BLOCKS, split({"w": {"a": 64, "b": 64}})], "'experts.0.w' has a scale for each"),
        ([*BLOCKS, fuse({"x": ("0", "2")})], "put the layer Fuse before fp8"),
    ],
)
def test_a_layer_that_cannot_do_its_work_is_an_error_before_anything_is_sent(
    layers: list[Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Sender(Loopback(), WEIGHTS, num_workers=1, layers=layers)


@pytest.mark.parametrize(
    ("numbered", "plain"), [("w", "v"), ("w.#.#", "v"), ("w.#", "v.#"), ("#", "*")]
)
def test_patterns_without_a_number(numbered: str, plain: str) -> None:
    with pytest.raises(ValueError, match=r"'#'|'\*'"):
        stack({numbered: plain})


def test_the_rest_of_a_selection_may_match_no_pattern() -> None:
    """Later updates of ``select`` lack tensors; a pattern for those is not an error."""
    source = {"a.0.w": torch.zeros(2), "a.1.w": torch.zeros(2), "b.w": torch.zeros(2)}
    target = {"a": torch.ones(2, 2), "b.w": torch.ones(2)}
    layers = [select("b.*"), stack({"a.#.w": "a"})]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), target)
        for value in (1.0, 2.0):
            source["b.w"].fill_(value)
            push(sender, receiver)
            assert target["b.w"].tolist() == [value, value]
    assert target["a"].sum() == 0
