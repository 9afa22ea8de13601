"""Pairs of a trainer's model and a worker's: exact, or an error at both ends, not a deadline."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import ray
import torch
import torch.distributed as dist
from ray import cloudpickle
from torch import Tensor, nn

from sync_core import Receiver, Sender, SendError, SyncError
from sync_plugin_std import fuse, lora, rename, select

pytestmark = [
    pytest.mark.timeout(240),
    # Of torch's own, when it imports what compiles, quantizes or shards.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# Ray's actor cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# A deadline beyond that of the tests, in seconds: a case that waited for it would fail.
_NEVER = 600.0

SCHEMES = ["thread", "shm", "mp", "dist", pytest.param("ray", marks=pytest.mark.long)]


class Net(nn.Module):
    """A language model's parts: embedding, projections, head, a buffer that is not persistent."""

    def __init__(self, value: float, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 2)
        self.head = nn.Linear(4, 6, bias=False)
        self.register_buffer("scratch", torch.full((2,), value), persistent=False)
        if tied:
            self.head.weight = self.embed.weight
        for i, parameter in enumerate(self.parameters()):
            # Exact in 16 bits, and the same in tied tensors.
            nn.init.constant_(parameter, value if value == 0 else value + i / 8)


class FusedNet(nn.Module):
    """The same for inference: projections in one, no value head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.head = nn.Linear(4, 6, bias=False)


def untied(value: float) -> Net:
    return Net(value)


def tied(value: float) -> Net:
    return Net(value, tied=True)


def halved(value: float) -> nn.Module:
    return Net(value).bfloat16()


def compiled(value: float) -> Any:
    return torch.compile(Net(value))


def parallel(value: float) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net(value))


def checkpointed(value: float) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(Net(value))


def frozen(value: float) -> nn.Module:
    model = Net(value)
    model.embed.requires_grad_(False)
    return model


def flat(value: float) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(Net(value), device_id=torch.device("cpu"))


def quantized(value: float) -> nn.Module:
    model = torch.ao.quantization.quantize_dynamic(Net(value), {nn.Linear})
    assert isinstance(model, nn.Module)
    return model


def torchao(value: float) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = Net(value)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def adapted(value: float) -> Any:
    """A model under LoRA; the trainer's has learned something."""
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(Net(1.0), LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, value)
    return peft


def merged(source: Any) -> Any:
    return copy.deepcopy(source).merge_and_unload()


def same(source: Any) -> Any:
    return source


class Pair(NamedTuple):
    """A trainer's model, a worker's, the layers, and what to expect.

    `plain` gives the model that has the values that the worker must have.
    """

    source: Callable[[float], Any]
    target: Callable[[float], Any]
    layers: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    error: str | None = None
    unreadable: bool = False
    plain: Callable[[Any], Any] = same


FUSED = (fuse({"qk": ("q_proj", "k_proj")}), rename({"scratch": None, "*": "*"}))
MERGED = lora("merged")
AO = r"before torchao's quantize_\(\)"
PAIRS = {
    "fp32 to fp32": Pair(untied, untied),
    "fp32 to bf16": Pair(untied, halved, ("bf16",)),
    "fp32 to bf16 without a layer": Pair(untied, halved, error=r'layers=\["bf16"\]'),
    "bf16 to bf16": Pair(halved, halved),
    "bf16 to bf16 with a layer": Pair(halved, halved, ("bf16",)),
    "bf16 to fp32": Pair(halved, untied, ("bf16",)),
    "compiled source": Pair(compiled, untied),
    "compiled worker": Pair(untied, compiled),
    "data parallel": Pair(parallel, untied),
    "activation checkpointing": Pair(checkpointed, untied),
    "tied to tied": Pair(tied, tied),
    "tied to untied": Pair(tied, untied),
    "untied to tied": Pair(untied, tied, error="one tensor in the model and two in the weights"),
    "fused names": Pair(untied, lambda _: FusedNet(), FUSED),
    "fused names in bf16": Pair(untied, lambda _: FusedNet().bfloat16(), ("bf16", *FUSED)),
    "other names": Pair(untied, lambda _: FusedNet(), error=r"not in the model[\s\S]*rename\("),
    "a checkpoint's names": Pair(untied, untied, options={"strategy": "checkpoint"}),
    "a selection": Pair(frozen, untied, (select(trainable=True),)),
    "PEFT to PEFT": Pair(adapted, adapted),
    "PEFT merged to plain": Pair(adapted, untied, (MERGED,), plain=merged),
    "PEFT merged to bf16": Pair(adapted, halved, (MERGED, "bf16"), plain=merged),
    "PEFT to plain": Pair(adapted, untied, error=r"not in the model[\s\S]*lora\(.merged"),
    "adapter only": Pair(adapted, adapted, (lora("adapter"),)),
    "adapter only, in bf16": Pair(
        adapted, lambda value: adapted(value).bfloat16(), (lora("adapter"), "bf16")
    ),
    "quantized worker": Pair(untied, quantized, error="before it was quantized"),
    "quantized source": Pair(quantized, untied, error="before it was quantized", unreadable=True),
    "torchao worker": Pair(untied, torchao, error=AO),
    "torchao source": Pair(torchao, untied, error=AO, unreadable=True),
    "FSDP1": Pair(flat, untied, error="FULL_STATE_DICT", unreadable=True),
}


class Worker:
    """An actor with a model, and no code of ours."""

    model: Any = None

    def host(self, make: Callable[[float], Any]) -> None:
        self.model = make(0.0)

    def values(self) -> dict[str, Tensor]:
        return values(self.model)


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    """One actor for all pairs, of Ray as other tests have started it, or of our own."""
    ours = not ray.is_initialized()
    if ours:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray.remote(num_cpus=0)(Worker).remote()
    if ours:
        ray.shutdown()


@contextmanager
def process_group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def expected(model: Any) -> dict[str, Tensor]:
    """The values of the trainer's model as a worker of any kind names them."""
    plain = getattr(model, "module", getattr(model, "_orig_mod", model))
    named = {
        name.replace("_checkpoint_wrapped_module.", ""): tensor
        for name, tensor in (
            *plain.named_parameters(remove_duplicate=False),
            *plain.named_buffers(),
        )
    }
    for kind in ("weight", "bias"):
        parts = [named[name] for part in "qk" if (name := f"{part}_proj.{kind}") in named]
        if parts:
            named[f"qk.{kind}"] = torch.cat(parts)
    return named


def values(model: Any) -> dict[str, Tensor]:
    plain = getattr(model, "_orig_mod", model)
    return {name: p.detach() for name, p in plain.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_pair(pair: Pair, scheme: str, request: pytest.FixtureRequest) -> None:
    with process_group():
        source = pair.source(1.0)
        if pair.unreadable:
            with pytest.raises(SyncError, match=pair.error):
                Sender(scheme, source, num_workers=1, layers=pair.layers, **pair.options)
        elif scheme == "ray":
            called(pair, source, request.getfixturevalue("actor"))
        elif pair.error is None:
            served(pair, source, scheme)
        else:
            refused(pair.error, source, pair.target(0.0), scheme)


def served(pair: Pair, source: Any, scheme: str) -> None:
    target = pair.target(0.0)
    with (
        Sender(scheme, source, num_workers=1, layers=pair.layers, **pair.options) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        for version in (1, 2):
            pending = sender.send_async()
            assert receiver.receive(10) == version
            assert pending.wait().updated == (0,)
    check(pair, source, values(target))


def called(pair: Pair, source: Any, actor: Any) -> None:
    ray.get(actor.host.remote(pair.target), timeout=100)
    with Sender(
        "ray",
        source,
        workers=[actor],
        model_id="model",
        layers=pair.layers,
        timeout=_NEVER,
        **pair.options,
    ) as sender:
        if pair.error is not None:
            with pytest.raises(SendError, match=pair.error):
                sender.send()
            return
        for _ in range(2):
            assert sender.send().updated == (0,)
    check(pair, source, ray.get(actor.values.remote(), timeout=100))


def check(pair: Pair, source: Any, found: dict[str, Tensor]) -> None:
    wanted = expected(pair.plain(source))
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name


@pytest.mark.usefixtures("actor")
def test_a_receiver_over_ray_refuses_at_once() -> None:
    pair = PAIRS["other names"]
    assert pair.error is not None
    refused(pair.error, pair.source(1.0), pair.target(0.0), "ray")


def refused(error: str, source: Any, target: Any, scheme: str) -> None:
    with Sender(scheme, source, num_workers=1, timeout=_NEVER) as sender:
        pending = sender.send_async()
        with pytest.raises(SyncError, match=error):
            Receiver(sender.address(0), target)
        with pytest.raises(SendError, match=error):
            pending.wait()
