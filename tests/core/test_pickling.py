"""Tensors pickle as their own values, whatever they are a view of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from sync_plugin_std.workers.calls import dumps, dumps_copy, loads

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def size(value: object) -> int:
    return sum(len(part) for part in dumps(value))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (300, 400)])
def test_values_dtype_and_shape_survive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    copy = loads(dumps_copy(tensor))
    assert (copy.dtype, copy.shape, bits(copy)) == (dtype, tensor.shape, bits(tensor))


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[1:3],
        lambda base: base[:, ::2],
        lambda base: base.t(),
        lambda base: base[:1].expand(5, 1000),
    ],
)
def test_a_view_does_not_bring_its_base(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.arange(1_000_000.0).view(1000, 1000))
    assert size(tensor) < 4 * tensor.numel() + 1000
    assert torch.equal(loads(dumps_copy(tensor)), tensor)


def test_the_order_of_dimensions_in_memory_survives() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert loads(dumps_copy(tensor)).stride() == tensor.stride()


def test_what_arrives_can_be_written_to() -> None:
    for tensor in (torch.zeros(3), torch.zeros(100_000)):
        assert loads(dumps_copy(tensor)).add_(1).min() == 1
    array = loads(dumps_copy(np.zeros(100_000)))
    array += 1
    assert array.min() == 1


def test_a_copy_is_of_the_moment() -> None:
    tensor = torch.zeros(100_000)
    parts = dumps_copy(tensor)
    tensor.fill_(1)
    assert not loads(parts).any()


def test_a_module_keeps_its_parameters_and_ties() -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    module["b"].weight = module["a"].weight
    module["a"].bias.requires_grad_(False)
    copy = loads(dumps_copy(module))
    assert copy["b"].weight is copy["a"].weight
    assert isinstance(copy["a"].weight, nn.Parameter)
    assert copy["a"].weight.requires_grad
    assert not copy["a"].bias.requires_grad
    assert torch.equal(copy["a"].weight, module.get_parameter("a.weight"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
    ],
)
def test_tensors_that_are_more_than_values_go_torchs_way(tensor: torch.Tensor) -> None:
    copy = loads(dumps_copy(tensor))
    assert copy.requires_grad == tensor.requires_grad
    assert copy.layout == tensor.layout
    assert torch.equal(copy.to_dense(), tensor.to_dense())
