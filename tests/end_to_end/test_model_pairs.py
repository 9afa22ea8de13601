"""Pairs of a trainer's model and a worker's: exact, or an error at both ends, not a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sync_core import Receiver, Sender, SendError, SyncError
from sync_plugin_std import Fuse, Rename, Select

pytestmark = [
    pytest.mark.timeout(60),
    # Of torch's own, when it imports what compiles, quantizes or shards.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SCHEMES = ["thread", "shm", "mp", "dist", "ray"]


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


class Pair(NamedTuple):
    """A trainer's model, a worker's, the layers, and what to expect."""

    source: Callable[[float], Any]
    target: Callable[[float], Any]
    layers: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    error: str | None = None
    unreadable: bool = False


FUSED = (Fuse({"qk": ("q_proj", "k_proj")}), Rename({"scratch": None, "*": "*"}))
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
    "other names": Pair(untied, lambda _: FusedNet(), error="is in the weights, not in the model"),
    "a checkpoint's names": Pair(untied, untied, options={"strategy": "checkpoint"}),
    "a selection": Pair(frozen, untied, (Select(trainable=True),)),
    "quantized worker": Pair(untied, quantized, error="before it was quantized"),
    "FSDP1": Pair(flat, untied, error="FULL_STATE_DICT", unreadable=True),
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray, unless other tests have started it in this process."""
    if ray.is_initialized():
        yield
        return
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
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
        named[f"qk.{kind}"] = torch.cat([named[f"{part}.{kind}"] for part in ("q_proj", "k_proj")])
    return named


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_pair(pair: Pair, scheme: str) -> None:
    with process_group():
        if pair.error is not None:
            refused(pair, scheme, pair.error)
        else:
            served(pair, scheme)


def served(pair: Pair, scheme: str) -> None:
    source, target = pair.source(1.0), pair.target(0.0)
    with (
        Sender(scheme, source, num_workers=1, layers=pair.layers, **pair.options) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        for version in (1, 2):
            pending = sender.send_async()
            assert receiver.receive(10) == version
            assert pending.wait().updated == (0,)
    values = expected(source)
    plain = getattr(target, "_orig_mod", target)
    for name, tensor in plain.named_parameters(remove_duplicate=False):
        assert torch.equal(tensor, values[name].to(tensor.dtype)), name


def refused(pair: Pair, scheme: str, error: str) -> None:
    source, target = pair.source(1.0), pair.target(0.0)
    if pair.unreadable:
        with pytest.raises(SyncError, match=error):
            Sender(scheme, source, num_workers=1, layers=pair.layers, **pair.options)
        return
    with Sender(scheme, source, num_workers=1, layers=pair.layers, **pair.options) as sender:
        pending = sender.send_async()
        began = time.monotonic()
        with pytest.raises(SyncError, match=error):
            Receiver(sender.address(0), target)
        with pytest.raises(SendError, match=error):
            pending.wait()
    # A second on a quiet machine, Ray's actor of the sender aside; the deadline is sixty.
    assert time.monotonic() - began < 20
