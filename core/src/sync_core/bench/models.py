"""The models that a benchmark sends, and how to tell their versions apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model of equal float32 tensors.

    Args:
        tensors: how many.
        nbytes: the bytes of each.
    """

    tensors: int
    nbytes: int


#: ``small`` is a two-layer, 64-wide MLP.
MODELS: dict[str, ModelSize | None] = {
    "small": None,
    "medium": ModelSize(10, MIB),
    "large": ModelSize(200, 2 * MIB),
    "huge": ModelSize(150, 1024 * MIB // 150 // 4 * 4),
    "many": ModelSize(2000, 4096),
}


def make_model(name: str) -> nn.Module:
    """The model of one of the names in `MODELS`."""
    size = MODELS[name]
    if size is None:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )
    return nn.ParameterList(torch.zeros(size.nbytes // 4) for _ in range(size.tensors))


def mark(model: nn.Module, version: int) -> None:
    """Fill every tensor with a value of its own, of this version."""
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            parameter.fill_(_value(version, position))


def is_marked(model: nn.Module, version: int) -> bool:
    """Whether every element of every tensor is of this version."""
    return all(
        bool((parameter == _value(version, position)).all())
        for position, parameter in enumerate(model.parameters())
    )


def _value(version: int, position: int) -> float:
    return float(version * 4096 + position)  # exact in float32 for the first 4,096 versions
