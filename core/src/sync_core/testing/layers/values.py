"""Every kind of weights comes back as it was, or as near as the layer says."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from sync_core.testing.layers.base import LayerCases
from sync_core.testing.layers.weights import eighths, matrix
from sync_core.testing.schemes.models import (
    Tied,
    fingerprints,
    frozen,
    make_policy,
    nested,
    parametrised,
    recurrent,
    stateful,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SHAPES = ((), (0,), (3, 0, 2), (1,), (7,), (13, 17), (2, 3, 4, 5))


class ValueCases(LayerCases):
    """Dtypes, shapes, modules, and the forms of an update."""

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_floating_point_comes_back(self, senders: ExitStack, dtype: torch.dtype) -> None:
        link = self.link(senders, {"w": eighths(1).to(dtype)}, {"w": torch.zeros(12, dtype=dtype)})
        for seed in (1, 2, 3):
            link.send({"w": eighths(seed).to(dtype)})
            self.check(link.target, {"w": eighths(seed).to(dtype)})

    @pytest.mark.parametrize("dtype", OTHERS, ids=str)
    def test_other_dtypes_come_back_exactly(self, senders: ExitStack, dtype: torch.dtype) -> None:
        link = self.link(senders, {"w": matrix(1, dtype)}, {"w": matrix(0, dtype)})
        for value in (1, 0, 1):
            link.send({"w": matrix(value, dtype)})
            assert fingerprints(link.target) == fingerprints({"w": matrix(value, dtype)})

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_shapes_come_back(self, senders: ExitStack, shape: tuple[int, ...]) -> None:
        source, target = {"w": torch.full(shape, 2.0)}, {"w": torch.zeros(shape)}
        self.link(senders, source, target).send()
        self.check(target, source)

    @pytest.mark.parametrize(
        "make", [nested, parametrised, recurrent, frozen, Tied, stateful, make_policy]
    )
    def test_every_kind_of_module(self, senders: ExitStack, make: Any) -> None:
        source, target = make(1), make(0)
        self.link(senders, source, target).send()
        self.check(target.state_dict(), source.state_dict())

    def test_tensors_in_another_order_of_memory(self, senders: ExitStack) -> None:
        base = eighths(1).view(3, 4)
        source = {"t": base.t(), "s": base[:, ::2], "e": torch.ones(1).expand(5)}
        target = {name: torch.zeros(tensor.shape) for name, tensor in source.items()}
        self.link(senders, source, target).send()
        self.check(target, source)

    def test_tied_tensors_stay_tied(self, senders: ExitStack) -> None:
        target = Tied(0)
        self.link(senders, Tied(3), target).send()
        assert target.is_tied()

    def test_many_tensors(self, senders: ExitStack) -> None:
        source = {f"blocks.{i}.weight": torch.full((i % 3,), float(i)) for i in range(500)}
        target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        self.link(senders, source, target).send()
        self.check(target, source)

    def test_several_models(self, senders: ExitStack) -> None:
        source = {"actor": make_policy(1.0), "critic": nested(1)}
        target = {"actor": make_policy(), "critic": nested(0)}
        self.link(senders, source, target).send()
        for name, model in source.items():
            self.check(target[name].state_dict(), model.state_dict())

    def test_a_partial_update(self, senders: ExitStack) -> None:
        source, target = make_policy(1.0), make_policy()
        link = self.link(senders, source, target, partial=True)
        link.send()
        link.send({"0.bias": torch.full((4,), 6.0)})
        expected = source.state_dict() | {"0.bias": torch.full((4,), 6.0)}
        self.check(target.state_dict(), expected)

    def test_strategy_state_dict(self, senders: ExitStack) -> None:
        source, target = nested(1), nested(0)
        self.link(senders, source, target, strategy="state_dict").send()
        self.check(target.state_dict(), source.state_dict())
