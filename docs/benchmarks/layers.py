"""Measures how many bytes layers save for a language model, and their cost without changes.

    OMP_NUM_THREADS=1 python docs/benchmarks/layers.py

The language model is a Llama with random weights and LoRA adapters on the query and value
projections. The receiver is in the same process, over the scheme `shm`. Each way has its own
sender. The ways alternate in each round; the first version of each, which is whole, is not counted.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from sync_core import Receiver, Sender, SendReport
from sync_plugin_std import lora, rename, select

_WARM_UP = 2


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    llama = _llama()
    plain = copy.deepcopy(llama)
    adapted: Any = get_peft_model(
        llama, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    )
    ways = {
        "whole, float32": _Way(adapted, copy.deepcopy(adapted), []),
        "`bf16`": _Way(adapted, copy.deepcopy(adapted).bfloat16(), ["bf16"]),
        "`zstd`": _Way(adapted, copy.deepcopy(adapted), ["zstd"]),
        "`bf16`, `zstd`": _Way(adapted, copy.deepcopy(adapted).bfloat16(), ["bf16", "zstd"]),
        "`fp8`, `bf16`": _Way(plain, None, ["fp8", "bf16"]),
        '`lora("merged")`': _Way(adapted, copy.deepcopy(plain), [lora("merged")]),
        '`lora("merged")`, `bf16`': _Way(
            adapted, copy.deepcopy(plain).bfloat16(), [lora("merged"), "bf16"]
        ),
        "`select(trainable=True)`": _Way(adapted, copy.deepcopy(adapted), [select(trainable=True)]),
        '`lora("adapter")`': _Way(adapted, copy.deepcopy(adapted), [lora("adapter")]),
        '`lora("adapter")`, `bf16`': _Way(
            adapted, copy.deepcopy(adapted).bfloat16(), [lora("adapter"), "bf16"]
        ),
    }
    print("| model | layers | bytes | share | ms | ratio |\n|---|---|--:|--:|--:|--:|")
    _measure("Llama with LoRA", ways, rounds, lambda: _train(adapted))
    many = {f"layer.{i}": torch.randn(1024) for i in range(2_000)}
    halves = {name: tensor.bfloat16() for name, tensor in many.items()}
    for name, weights, layers in (
        ("2,000 of 4 KB, float32", many, {"none": [], "`rename`": [rename({"*": "*"})]}),
        ("2,000 of 2 KB, bfloat16", halves, {"none": [], "`bf16`": ["bf16"]}),
    ):
        modules = {each: (_module(weights), _module(weights)) for each in layers}
        _measure(
            name,
            {each: _Way(*modules[each], chosen) for each, chosen in layers.items()},
            rounds * 3,
            lambda: None,
        )


class _Way:
    """A sender and its receiver.

    Args:
        source: the trainer's model.
        target: the worker's model; None for a worker that accepts any weights.
        layers: the sender's layers.
    """

    def __init__(self, source: Any, target: Any, layers: list[Any]) -> None:
        self._sender = Sender("shm", source, num_workers=1, layers=layers)
        address = self._sender.address(0)
        load = None if target is not None else lambda weights: deque(weights, maxlen=0)
        self._receiver = Receiver(address, target, load=load)

    def send(self) -> tuple[SendReport, float]:
        """Send once; return the report, and the seconds until the version was committed."""
        started = time.perf_counter()
        pending = self._sender.send_async()
        self._receiver.receive()
        return pending.wait(), time.perf_counter() - started

    def close(self) -> None:
        """Close both."""
        self._receiver.close()
        self._sender.close()


def _measure(model: str, ways: Mapping[str, _Way], rounds: int, change: Callable[[], None]) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    nbytes: dict[str, int] = {}
    for _ in range(_WARM_UP + rounds):
        change()
        for name, way in ways.items():
            report, elapsed = way.send()
            seconds[name].append(elapsed)
            nbytes[name] = report.nbytes
    whole = next(iter(ways))
    medians = {name: median(each[_WARM_UP:]) * 1000 for name, each in seconds.items()}
    for name, way in ways.items():
        share, ratio = nbytes[name] / nbytes[whole], medians[name] / medians[whole]
        print(
            f"| {model} | {name} | {nbytes[name]:,} | {share:.3f} | {medians[name]:.2f} "
            f"| {ratio:.2f} |"
        )
        way.close()


def _llama() -> Any:
    config = LlamaConfig(
        vocab_size=8_000,
        hidden_size=512,
        intermediate_size=1_376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def _train(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(1e-3)


def _module(weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in weights.items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor.clone()))
    return module


if __name__ == "__main__":
    main()
