"""The layers bf16 and fp16: what workers may hold in float32 arrives bit by bit."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

from sync_core import (
    ModelError,
    PendingSendError,
    ReadbackError,
    Receiver,
    Sender,
    SendError,
    gathered,
)
from sync_plugin_std import bf16, fp16, fuse, rename, select, split
from sync_testing import Loopback

# Of the libraries, when they are imported and when models are made.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


class Router(nn.Module):
    """A model with what is kept in float32 beside matrices in 16 bits."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(4, 8, 8, dtype=dtype))
        self.correction = nn.Parameter(torch.rand(64) / 4 + 6.8)
        self.register_buffer("inv_freq", 1.0 / 10_000 ** (torch.arange(16) / 16))
        # Running statistics of images.
        self.register_buffer("mean", torch.randn(3, 5, 5))
        self.register_buffer("steps", torch.tensor(3))


def push(sender: Sender, *receivers: Receiver) -> None:
    pending = sender.send_async()
    for receiver in receivers:
        receiver.receive(20)
    assert len(pending.wait(20).updated) == len(receivers)


@pytest.mark.parametrize("scheme", ["thread", "shm", "mp", "file"])
@pytest.mark.parametrize("layer", [bf16, fp16])
def test_workers_of_several_dtypes_hold_what_they_would_make_of_the_trainers(
    scheme: str, layer: Any, tmp_path: Path
) -> None:
    source = Router()
    workers = [Router(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    options: dict[str, Any] = {"directory": str(tmp_path)} if scheme == "file" else {}
    with Sender(scheme, source, num_workers=3, layers=[layer()], **options) as sender:
        receivers = [Receiver(sender.address(i), worker) for i, worker in enumerate(workers)]
        try:
            push(sender, *receivers)
        finally:
            for receiver in receivers:
                receiver.close()
    wire = torch.bfloat16 if layer is bf16 else torch.float16
    for worker in workers:
        for name, tensor in worker.state_dict().items():
            sent = source.state_dict()[name]
            sent = sent.to(wire) if name in ("gate.weight", "experts") else sent
            assert torch.equal(tensor, sent.to(tensor.dtype)), name


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    source=KINDS,
    worker=KINDS,
    buffer=st.booleans(),
    renamed=st.booleans(),
)
def test_vectors_and_buffers_are_not_rounded(
    shape: list[int], source: torch.dtype, worker: torch.dtype, *, buffer: bool, renamed: bool
) -> None:
    def module(dtype: torch.dtype) -> nn.Module:
        found, tensor = nn.Module(), torch.randn(shape).to(dtype)
        if buffer:
            found.register_buffer("w", tensor)
        else:
            found.w = nn.Parameter(tensor)
        return found

    trainer, target = module(source), module(worker)
    layers = [rename({"*": "x.*"}), rename({"x.*": "*"}), "bf16"] if renamed else ["bf16"]
    with Sender(Loopback(), trainer, num_workers=1, layers=layers) as sender:
        push(sender, Receiver(sender.address(0), target))
    sent = trainer.state_dict()["w"]
    if not buffer and len(shape) > 1 and source.itemsize > 2:
        sent = sent.bfloat16()
    assert torch.equal(target.state_dict()["w"], sent.to(worker))


def test_rotary_frequencies_stay_those_of_the_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    trainer: Any = LlamaForCausalLM(config)
    trainer.save_pretrained(tmp_path)
    worker = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in worker.named_buffers()}
    with Sender(Loopback(), trainer, num_workers=1, layers=["bf16"]) as sender:
        push(sender, Receiver(sender.address(0), worker))
    assert before
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.named_buffers())
    merged = trainer.bfloat16().state_dict()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in worker.state_dict().items())


def sent_dtypes(source: Any, layers: list[Any]) -> dict[str, str]:
    with Sender(Loopback(), source, num_workers=0, layers=layers) as sender:
        sender.send()
        specs = sender.address_template().layout.specs
    return {spec.name: str(spec.dtype).removeprefix("torch.") for spec in specs}


def test_buffers_of_a_tensordict_are_not_cast() -> None:
    def module() -> nn.Module:
        found = nn.Sequential(nn.Linear(3, 3), nn.Module())
        found[1].register_buffer("table", torch.randn(3, 3))
        return found

    trainer, target = module(), module()
    source = TensorDict.from_module(trainer)
    with Sender(Loopback(), source, num_workers=1, layers=["bf16"]) as sender:
        push(sender, Receiver(sender.address(0), target))
    sent, got = trainer.state_dict(), target.state_dict()
    assert torch.equal(got["1.table"], sent["1.table"])
    assert torch.equal(got["0.weight"], sent["0.weight"].bfloat16().float())


@pytest.mark.parametrize("several", [False, True])
def test_buffers_of_gathered_models_are_not_cast(several: bool) -> None:
    def module() -> nn.Module:
        found = nn.Sequential(nn.Linear(3, 3), nn.Module())
        found[1].register_buffer("table", torch.randn(3, 3))
        return found

    trainer, target = module(), module()
    source = gathered({"policy": trainer} if several else trainer)
    model = {"policy": target} if several else target
    with Sender(Loopback(), source, num_workers=1, layers=["bf16"]) as sender:
        push(sender, Receiver(sender.address(0), model))
    sent, got = trainer.state_dict(), target.state_dict()
    assert torch.equal(got["1.table"], sent["1.table"])
    assert torch.equal(got["0.weight"], sent["0.weight"].bfloat16().float())


def test_patterns_name_what_is_cast_instead() -> None:
    found = sent_dtypes(Router(), [bf16("experts", "mean", "correction", "steps")])
    assert {name for name, dtype in found.items() if dtype == "bfloat16"} == {
        "experts",
        "mean",
        "correction",
    }
    with pytest.raises(ModelError, match=r"BFloat16, \('expert',\), matches one of 7 names"):
        sent_dtypes(Router(), [bf16("expert")])


def test_parts_of_a_buffer_are_not_cast() -> None:
    model = nn.ModuleDict({"stats": nn.Module(), "q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})
    model["stats"].register_buffer("mean", torch.randn(6, 4))
    layers = [split({"mean": {"a": 2, "b": 4}}), fuse({"qk": ("q", "k")}), "bf16"]
    assert sent_dtypes(model, layers) == {
        "stats.a": "float32",
        "stats.b": "float32",
        "qk.weight": "bfloat16",
        "qk.bias": "float32",
    }


def test_weights_by_hand_are_cast_as_those_of_the_model() -> None:
    source, target = Router(), Router(torch.bfloat16)
    held: dict[str, Tensor] = {}
    with Sender(Loopback(), source, num_workers=1, layers=["bf16"]) as sender:
        receiver = Receiver(sender.address(0), target)
        held.update((name, tensor + 1) for name, tensor in source.state_dict().items())
        pending = sender.send_async(held)
        receiver.receive(0)
        pending.wait(0)
    assert all(torch.equal(t, held[name].to(t.dtype)) for name, t in target.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layer", [bf16, fp16])
def test_what_a_selection_leaves_out_is_proved_in_the_dtype_of_the_worker(
    layer: Any, source_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    source, target = Router().to(source_dtype), Router().to(dtype)
    layers = [select("gate.weight"), layer()]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), target)
        push(sender, receiver)
        with torch.no_grad():
            source.gate.weight.add_(1)
        push(sender, receiver)
        with torch.no_grad():
            target.correction[3].mul_(1.5)
        sender.send_async()
        with pytest.raises(ReadbackError, match="leaves out tensors"):
            receiver.receive(0)


@pytest.mark.parametrize(
    ("layers", "sent", "held", "share"),
    [
        (["bf16"], torch.float64, torch.float32, 0.25),  # a vector, cast by the worker
        (["bf16"], torch.float32, torch.float16, 0.25),
        (["bf16"], torch.float32, torch.bfloat16, 1),  # as a mask of torch.finfo(…).min has it
        ([bf16("*")], torch.float64, torch.float32, 0.25),  # cast by the layer
        ([bf16("*")], torch.float32, torch.float32, 1),
        ([fp16("*")], torch.float32, torch.float32, 0.25),
    ],
)
def test_a_value_beyond_the_range_of_a_dtype_is_an_error(
    layers: Any, sent: torch.dtype, held: torch.dtype, share: float
) -> None:
    source = {"vector": torch.tensor([1.0, -torch.inf, torch.nan], dtype=sent)}
    target = {"vector": torch.zeros(3, dtype=held)}
    with Sender("thread", source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), target)
        push(sender, receiver)
        source["vector"][0] = torch.finfo(sent).max * share
        expected = r"'vector' has the value [0-9.e+]+, and b?float\d\d, .* ends at"
        with pytest.raises(ModelError, match=expected):
            push(sender, receiver)
        with suppress(SendError, PendingSendError):
            sender.wait_async(20)
        assert target["vector"].tolist()[:2] == [1.0, -torch.inf]
        source["vector"][0] = 2.0
        push(sender, receiver)
        receiver.close()
    assert target["vector"][0] == 2.0
