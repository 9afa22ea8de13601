"""Models that bitsandbytes has quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import ModelError, Receiver, Sender

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

INPUTS = torch.linspace(-1.0, 1.0, 4 * 64).reshape(4, 64)


def int8(*, ran: bool = False) -> nn.Module:
    module: nn.Module = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    if ran:
        # A forward moves the scales from the parameter into another attribute.
        module.to("cpu")(INPUTS)
    return module


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "nf4": lambda: bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4"),
    "nf4 in bfloat16": lambda: bitsandbytes.nn.Linear4bit(64, 64, quant_storage=torch.bfloat16),
    "fp4": lambda: bitsandbytes.nn.LinearFP4(64, 64, compress_statistics=False),
    "int8": int8,
    "int8 that ran": partial(int8, ran=True),
    "embedding nf4": lambda: bitsandbytes.nn.EmbeddingNF4(64, 64),
    "embedding int8": lambda: bitsandbytes.nn.Embedding8bit(64, 64),
}


def quantized(make: Callable[[], nn.Module]) -> nn.Module:
    """The move to a device is what quantizes."""
    return nn.Sequential(make()).to("cpu")


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("strategy", ["tensordict", "checkpoint", "state_dict"])
def test_a_quantized_layer_is_refused_at_either_end(
    make: Callable[[], nn.Module], strategy: Any
) -> None:
    refusal = "let each worker quantize a copy"
    with pytest.raises(ModelError, match=refusal) as failure:
        Sender("thread", quantized(make), num_workers=1, strategy=strategy)
    assert "strategy=" not in str(failure.value), "no strategy sends what is quantized"
    with pytest.raises(ModelError, match=refusal):
        Sender("thread", dict(quantized(make).named_parameters()), num_workers=1)
    plain = nn.Sequential(nn.Linear(64, 64))
    with Sender("thread", plain, num_workers=1, strategy=strategy) as sender:
        with pytest.raises(ModelError, match=refusal):
            sender.send(quantized(make))
        with pytest.raises(ModelError, match=refusal):
            Receiver(sender.address(0), quantized(make))


@pytest.mark.parametrize(
    "layer",
    [
        int8,
        lambda: bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4"),
    ],
    ids=["int8", "nf4"],
)
def test_a_worker_quantizes_a_copy_of_each_version(layer: Callable[[], nn.Module]) -> None:
    source, master = nn.Linear(64, 64), nn.Linear(64, 64)
    engine: dict[str, Any] = {}

    def copied(model: nn.Module) -> nn.Module:
        found = nn.Sequential(layer())
        found.load_state_dict(
            {f"0.{name}": tensor for name, tensor in copy.deepcopy(model).state_dict().items()}
        )
        return found.to("cpu")

    def requantize(_version: int) -> None:
        engine["model"] = copied(master)

    with Sender("thread", source, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), master, on_commit=requantize)
        for _ in range(2):
            with torch.no_grad():
                source.weight.mul_(-1.5)
            pending = sender.send_async()
            assert receiver.receive() == sender.version
            pending.wait()
            assert torch.equal(engine["model"](INPUTS), copied(source)(INPUTS))


def test_a_layer_with_8_bits_that_trains_in_16_travels() -> None:
    source, target = bitsandbytes.nn.Linear8bitLt(64, 64), bitsandbytes.nn.Linear8bitLt(64, 64)
    with Sender("thread", source, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), target)
        pending = sender.send_async()
        assert receiver.receive() == 1
        pending.wait()
    assert torch.equal(target.weight, source.weight)
