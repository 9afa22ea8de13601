"""A change of tensors other than of their values or places is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sync_core.models import tensor_layout
from sync_core.models.tensor_layout import KnownLayout, TensorSignatures
from sync_core.sending.pipeline import Source

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "type": lambda tensor: nn.Parameter(tensor, requires_grad=False),
    "dtype": lambda tensor: tensor.to(torch.complex128),
    "device": lambda tensor: tensor.to("meta"),
    "shape": lambda tensor: tensor.reshape(4, 2),
    "dimensions": lambda tensor: tensor.reshape(8),
    "stride": lambda tensor: tensor.t().contiguous().t(),
    "conjugation": torch.Tensor.conj,
    "layout": torch.Tensor.to_sparse_csr,
    "sparsity": torch.Tensor.to_sparse,
    "nesting": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "laziness": lambda _: nn.LazyLinear(2).weight,
}


@pytest.fixture(params=["compiled", "python"], autouse=True)
def _with_and_without_guards(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.param == "python":
        monkeypatch.setattr(tensor_layout, "TensorGuards", None)


def tensors() -> list[Tensor]:
    return [torch.ones(2, 4, dtype=torch.complex64), torch.empty(0), torch.tensor(1.0)]


def test_other_values_in_another_place_fit() -> None:
    assert TensorSignatures(tensors()).fit([tensor + 1 for tensor in tensors()])


@pytest.mark.filterwarnings("ignore:.*(nested|CSR) tensor:UserWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_else_changes_is_noticed(change: Callable[[Tensor], Tensor]) -> None:
    first, *others = tensors()
    known = TensorSignatures([first, *others])
    assert not known.fit([change(first), *others])
    assert known.fit([first, *others])


def test_what_lies_otherwise_in_memory_is_noticed() -> None:
    plain = torch.ones(2, 4)
    assert not TensorSignatures([plain]).fit([plain.to_mkldnn()])


def test_a_view_that_negates_is_noticed() -> None:
    negated = torch.ones(3, dtype=torch.complex64).conj().imag
    assert not TensorSignatures([negated]).fit([negated.resolve_neg()])


def test_a_parameter_that_is_given_other_data_is_noticed() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    known = TensorSignatures([parameter])
    parameter.data = parameter.data.half()
    assert not known.fit([parameter])


def test_another_number_of_tensors_does_not_fit() -> None:
    assert not TensorSignatures(tensors()).fit(tensors()[:2])
    assert not TensorSignatures(()).fit(tensors())


def test_a_tensor_in_the_place_of_another_like_it_fits() -> None:
    one, other = torch.ones(2), torch.ones(2)
    assert TensorSignatures([one, other]).fit([one, one])


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")]
)
def test_a_frozen_parameter_fits_in_any_mode(mode: Callable[[], object]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    known = TensorSignatures([parameter])
    with mode():  # type: ignore[attr-defined]
        assert known.fit([parameter])
    parameter.requires_grad_(False)
    assert known.fit([parameter])
    parameter.requires_grad_(True)
    assert known.fit([parameter])


CHANGED = {
    "shape": lambda one, two: {"one": one.reshape(4, 2), "two": two},
    "dtype": lambda one, two: {"one": one.double(), "two": two},
    "names": lambda one, two: {"one": one, "three": two},
    "order": lambda one, two: {"two": two, "one": one},
    "number": lambda one, two: {"one": one},
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_other_tensors_have_another_layout(
    change: Callable[[Tensor, Tensor], dict[str, Tensor]],
) -> None:
    known = KnownLayout({"one": torch.ones(2, 4), "two": torch.ones(3)})
    assert known.fits({"one": torch.zeros(2, 4), "two": torch.zeros(3)})
    assert not known.fits(change(torch.ones(2, 4), torch.ones(3)))


def test_tensors_that_are_tied_no_longer_do_not_fit() -> None:
    weight = torch.ones(2, 2)
    known = KnownLayout({"one": weight, "two": weight})
    other = torch.zeros(2, 2)
    assert known.fits({"one": other, "two": other})
    assert not known.fits({"one": other, "two": weight})


def test_a_sender_keeps_no_weights_that_it_was_given() -> None:
    source = Source(None, "tensordict", partial=False)
    given = {"weight": torch.ones(2)}
    kept = weakref.ref(given["weight"])
    source.read(given)
    del given
    assert kept() is None
