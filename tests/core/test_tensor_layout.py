"""A change of tensors, other than of their values or places, is noticed when they are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import Layout, ModelError, Payload, Sender, Update
from sync_core.models import Binding

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "values": lambda tensor: tensor + 1,
    "type": lambda tensor: nn.Parameter(tensor, requires_grad=False),
    "dtype": lambda tensor: tensor.to(torch.complex128),
    "shape": lambda tensor: tensor.reshape(4, 2),
    "dimensions": lambda tensor: tensor.reshape(8),
    "stride": lambda tensor: tensor.t().contiguous().t(),
    "conjugation": torch.Tensor.conj,
    "negation": torch._neg_view,
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "device": lambda tensor: tensor.to("meta"),
    "layout": torch.Tensor.to_sparse_csr,
    "sparsity": torch.Tensor.to_sparse,
    "memory": lambda tensor: tensor.real.contiguous().to_mkldnn(),
    "nesting": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "laziness": lambda _: nn.LazyLinear(2).weight,
}
MODELS: dict[str, Callable[[Tensor, Tensor], dict[str, Tensor]]] = {
    "names": lambda one, two: {"one": one, "three": two},
    "order": lambda one, two: {"two": two, "one": one},
    "number": lambda one, two: {"one": one},
    "more": lambda one, two: {"one": one, "two": two, "three": two.clone()},
}


@pytest.fixture(params=["compiled", "python"], autouse=True)
def _with_and_without_guards(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.param == "python":
        monkeypatch.setattr("sync_core.models.finder.TensorGuards", None)


def assert_read(binding: Binding, model: dict[str, Tensor]) -> None:
    update = binding.read()
    assert update.layout == Layout.of(model)
    payload = Payload.from_bytes(Payload(1, update.layout, update.source).to_bytes(), 1)
    got = dict(Update(payload.layout, payload.source).items())
    assert got.keys() == model.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_that_changes_is_read_as_it_is(change: Callable[[Tensor], Tensor]) -> None:
    model = {"a": torch.ones(2, 4, dtype=torch.complex64), "b": torch.empty(0)}
    binding = Binding(model)
    assert_read(binding, model)
    model["a"] = change(model["a"])
    assert_read(binding, model)


@pytest.mark.filterwarnings("ignore:.*(nested|CSR) tensor:UserWarning")
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_one_that_cannot_travel_any_more_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    first = torch.ones(2, 4, dtype=torch.complex64)
    model = {"a": first, "b": torch.empty(0)}
    binding = Binding(model)
    binding.read()
    model["a"] = change(first)
    with pytest.raises(ModelError, match="'a'"):
        binding.read()
    model["a"] = first
    assert_read(binding, model)


@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS)
def test_other_tensors_have_another_layout(
    change: Callable[[Tensor, Tensor], dict[str, Tensor]],
) -> None:
    one, two = torch.ones(2, 4), torch.zeros(2, 4)
    model = {"one": one, "two": two}
    binding = Binding(model)
    for now in (change(one, two), {"one": one, "two": two}):
        model.clear()
        model.update(now)
        assert_read(binding, model)


def test_a_parameter_that_is_given_other_data_is_noticed() -> None:
    model = {"a": nn.Parameter(torch.ones(2, 3))}
    binding = Binding(model)
    model["a"].data = model["a"].data.half()
    assert_read(binding, dict(model))


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")]
)
def test_a_frozen_parameter_is_the_same_in_any_mode(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    parameter = nn.Parameter(torch.ones(2))
    binding = Binding({"a": parameter})
    layout = binding.layout
    with mode():
        assert binding.layout is layout
    for wanted in (False, True):
        parameter.requires_grad_(wanted)
        assert binding.layout is layout


def test_a_sender_keeps_no_weights_that_it_was_given() -> None:
    with Sender("thread", {"weight": torch.zeros(2)}, num_workers=1) as sender:
        given = {"weight": torch.ones(2)}
        kept = weakref.ref(given["weight"])
        sender.send_async(given).abandon()
        del given
        assert kept() is None
