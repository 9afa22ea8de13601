"""Bindings: reading a model and writing into it, all or nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.core.models import Counter, filled, received
from torch import nn

from sync_core import LayoutMismatchError, ModelError, Sender, Update
from sync_core.models import Binding

STRATEGIES: list[Any] = ["tensordict", "state_dict"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_identity_grad_and_optimiser_state_survive() -> None:
    target = model()
    optimiser = torch.optim.Adam(target.parameters())
    target(torch.randn(8, 3)).sum().backward()
    optimiser.step()
    before = {n: (id(p), p.requires_grad, p.grad) for n, p in target.named_parameters()}
    momenta = [state["exp_avg"].clone() for state in optimiser.state.values()]
    target.get_parameter("0.weight").requires_grad_(False)
    Binding(target).write(Binding(filled(model(), 3.0)).read())
    for name, parameter in target.named_parameters():
        assert (id(parameter), parameter.grad) == (before[name][0], before[name][2])
        assert parameter.requires_grad is (name != "0.weight")
    for state, momentum in zip(optimiser.state.values(), momenta, strict=True):
        assert torch.equal(state["exp_avg"], momentum)
    assert {id(p) for p in optimiser.param_groups[0]["params"]} == {b[0] for b in before.values()}


MISMATCHES: list[tuple[dict[str, torch.Tensor], str]] = [
    ({"w": torch.ones(1, 2), "b": torch.ones(2)}, r"'w' is float32\[1, 2\] .* float32\[3, 2\]"),
    ({"w": torch.ones(()), "b": torch.ones(2)}, r"'w' is float32\[\] in the weights"),
    ({"w": torch.ones(3, 2), "b": torch.ones(2).double()}, r"'b' is float64\[2\] .* float32\[2\]"),
    ({"w": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.int64)}, "int64"),
    ({"w": torch.ones(3, 2)}, r"'b' is in the model, not in the weights\n"),
    ({"w": torch.ones(3, 2), "b": torch.ones(2), "c": torch.ones(1)}, "'c' is in the weights, not"),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("weights", "message"), MISMATCHES)
def test_a_mismatch_is_named_and_nothing_is_written(
    strategy: Any, weights: dict[str, torch.Tensor], message: str
) -> None:
    target = nn.ParameterDict({"w": torch.zeros(3, 2), "b": torch.zeros(2)})
    with pytest.raises(LayoutMismatchError, match=message):
        Binding(target, strategy).write(Update.of(weights))
    assert not any(parameter.any() for parameter in target.values())


def test_a_float_does_not_become_an_integer() -> None:
    target = {"steps": torch.zeros(1, dtype=torch.int64)}
    with pytest.raises(LayoutMismatchError, match=r"float32.*int64"):
        Binding(target).write(Update.of({"steps": torch.tensor([3.7])}))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_partial_update_only_when_asked_for(strategy: Any) -> None:
    target = nn.ParameterDict({"w": torch.zeros(2), "b": torch.zeros(2)})
    Binding(target, strategy).write(Update.of({"b": torch.ones(2)}), partial=True)
    assert target["b"].all()
    assert not target["w"].any()


@given(st.permutations(["0.weight", "0.bias", "1.weight", "1.bias"]))
def test_the_order_of_names_does_not_matter(order: list[str]) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    target = copy.deepcopy(filled(source, 0.0))
    filled(source, 1.0)
    state = source.state_dict()
    Binding(target).write(Update.of({name: state[name] for name in order}))
    assert all(parameter.all() for parameter in target.parameters())


def test_tied_in_the_weights_only_fills_both() -> None:
    shared = torch.ones(2)
    target = {"a": torch.zeros(2), "b": torch.zeros(2)}
    Binding(target).write(Update.of({"a": shared, "b": shared}))
    assert target["a"].all()
    assert target["b"].all()


def test_tied_in_the_model_only_is_an_error() -> None:
    shared = torch.zeros(2)
    with pytest.raises(LayoutMismatchError, match="one tensor in the model and two"):
        Binding({"a": shared, "b": shared}).write(
            Update.of({"a": torch.ones(2), "b": torch.ones(2)})
        )
    assert not shared.any()


def test_zero_copy_points_parameters_and_copies_buffers() -> None:
    target = model()
    update = Binding(filled(model(), 2.0)).read()
    pointers = {n: p.data_ptr() for n, p in dict(update.items()).items()}
    identity = [id(parameter) for parameter in target.parameters()]
    Binding(target).write(update, zero_copy=True)
    assert [id(parameter) for parameter in target.parameters()] == identity
    assert all(p.data_ptr() == pointers[n] for n, p in target.named_parameters())
    assert all(b.data_ptr() != pointers[n] for n, b in target.named_buffers())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("width", [4, 300])
def test_a_model_that_was_made_in_inference_mode_in_part(
    width: int, zero_copy: bool, strategy: Any
) -> None:
    target, source = nn.Linear(width, width), filled(nn.Linear(width, width), 3.0)
    with torch.inference_mode():
        target.bias = nn.Parameter(torch.zeros(width))
    binding = Binding(target, strategy)
    for _ in range(2):
        binding.write(Binding(source).read(), zero_copy=zero_copy)
    assert {v for t in values(target).values() for v in t.flatten().tolist()} == {3.0}


def test_zero_copy_follows_a_model_and_updates_that_change() -> None:
    target = model()
    binding = Binding(target, consolidate=True)
    binding.write(Binding(filled(model(), 2.0)).read(), zero_copy=True)
    target[0].weight = nn.Parameter(torch.zeros(4, 3))  # type: ignore[index]
    binding.write(Binding(filled(model(), 3.0)).read(), zero_copy=True)
    assert {v for t in values(target).values() for v in t.flatten().tolist()} == {3.0}
    part = Update.of({"2.bias": torch.ones(2), "1.running_mean": torch.ones(4)})
    binding.write(part, zero_copy=True, partial=True)
    ones = {name for name, tensor in values(target).items() if (tensor == 1).all()}
    assert ones == {"2.bias", "1.running_mean"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_extra_state_arrives_and_does_not_alias(strategy: Any) -> None:
    source, target = nn.Sequential(Counter(5)), nn.Sequential(Counter(1))
    Binding(target, strategy).write(Binding(source, strategy).read())
    source[0].count.fill_(9)  # type: ignore[operator]
    assert int(target[0].count) == 5  # type: ignore[arg-type]
    assert (target[0].weight == 5).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_extra_state_that_raises_leaves_the_old_version_whole(strategy: Any) -> None:
    source = nn.Sequential(Counter(5), Counter(5))
    target = nn.Sequential(Counter(1), Counter(1, fails=True))
    with pytest.raises(RuntimeError, match="five"):
        Binding(target, strategy).write(Binding(source, strategy).read())
    for module in target:
        assert int(module.count) == 1  # type: ignore[arg-type]
        assert (module.weight == 1).all()  # type: ignore[union-attr]


def test_a_model_that_changes_is_found_again() -> None:
    target = nn.Sequential(nn.Linear(2, 2))
    binding = Binding(target, consolidate=True)
    target[0].weight = nn.Parameter(torch.zeros(2, 2))
    source = filled(nn.Sequential(nn.Linear(2, 2)), 4.0)
    binding.write(Binding(source).read())
    assert (target[0].weight == 4).all()
    target.append(nn.Linear(2, 1))
    assert "1.weight" in binding.layout.names
    target.half()
    assert {spec.dtype for spec in binding.layout.specs} == {torch.float16}


def test_a_tie_that_is_undone_is_noticed() -> None:
    shared = nn.Parameter(torch.zeros(2))
    other = nn.Parameter(shared.detach())
    target = nn.ParameterDict({"a": shared, "b": other})
    binding = Binding(target, consolidate=True)
    assert binding.layout.aliases == (("b", "a"),)
    other.data = torch.zeros(2)
    assert not binding.layout.aliases


def test_a_tie_that_was_made_since_is_noticed() -> None:
    target = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("a", "b")})
    binding = Binding(target, consolidate=True)
    weights = Update.of({"a": torch.ones(2), "b": torch.full((2,), 2.0)})
    binding.write(weights)
    target["b"].data = target["a"].data
    with pytest.raises(LayoutMismatchError, match="one tensor in the model and two in the weights"):
        binding.write(weights)
    assert (target["a"] == 1).all()


def test_a_tied_tensor_that_was_transposed_is_tied_no_more() -> None:
    shared = nn.Parameter(torch.arange(4.0).view(2, 2))
    source = nn.ParameterDict({"a": shared, "b": nn.Parameter(shared.detach())})
    binding = Binding(source)
    assert binding.layout.aliases == (("b", "a"),)
    source["b"].data = shared.data.t()
    update = binding.read()
    assert torch.equal(dict(update.items())["b"], shared.t())
    tied = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 2))})
    tied["b"] = tied["a"]
    with (
        Sender("thread", tied, num_workers=1) as sender,
        pytest.raises(LayoutMismatchError, match="hold different values"),
    ):
        sender.send_async(dict(update.items()))


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([float("nan"), 1.0]),
        torch.arange(8, dtype=torch.uint8).view(torch.complex32),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor(2.0),
        torch.zeros(0, 2),
    ],
    ids=lambda values: f"{values.dtype} {list(values.shape)}",
)
def test_tied_tensors_given_twice_are_compared_by_their_bits(values: torch.Tensor) -> None:
    tied = {"a": values, "b": values}
    with Sender("thread", tied, num_workers=1) as sender:
        sender.send_async({"a": values.clone(), "b": values.clone()}).abandon()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (nn.Sequential(), "Sequential has no tensors"),
        ({}, "dict has no tensors"),
        (nn.LazyLinear(2), "'weight' has no shape yet"),
    ],
)
def test_models_that_cannot_be_bound(target: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Binding(target)


def test_an_expanded_tensor_cannot_be_written() -> None:
    target = {"a": torch.zeros(2), "b": torch.zeros(1).expand(3)}
    with pytest.raises(ModelError, match=r"'b' was made by expand"):
        Binding(target).write(Update.of({"a": torch.ones(2), "b": torch.ones(3)}))
    assert not target["a"].any()


def test_a_tensordict_and_a_nested_dict_are_written_in_place() -> None:
    weight = torch.zeros(2)
    Binding({"net": {"weight": weight}}).write(Update.of({"net.weight": torch.ones(2)}))
    assert weight.all()
    target = TensorDict({"net": {"weight": torch.zeros(2)}})
    Binding(target).write(Update.of({"net.weight": torch.ones(2)}))
    assert target["net", "weight"].all()


NEGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": lambda data: torch.complex(data, data + 1).conj(),
    "imaginary": lambda data: torch.complex(data, data + 1).conj().imag,
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("width", [2, 200])
@pytest.mark.parametrize("view", NEGATED.values(), ids=NEGATED)
def test_a_view_that_negates_is_written(
    view: Callable[[torch.Tensor], torch.Tensor], width: int, zero_copy: bool, strategy: Any
) -> None:
    def model(value: float) -> nn.Module:
        module = nn.ParameterDict({"plain": torch.full((width,), value)})
        module["view"] = nn.Parameter(view(torch.full((width, width), value)))
        module.register_buffer("buffer", view(torch.full((width, width), value)))
        return module

    source, target = model(2.0), model(1.0)
    binding = Binding(target, strategy)
    for _ in range(2):
        binding.write(received(source), zero_copy=zero_copy)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)
    assert target["view"].is_leaf  # type: ignore[index]


def test_a_model_of_inference_mode_whose_hook_raises_keeps_its_weights() -> None:
    with torch.inference_mode():
        target = filled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1.0)

    def fail(*_: Any) -> None:
        raise RuntimeError("no weights for me")

    target[1].register_load_state_dict_post_hook(fail)  # type: ignore[index]
    source = filled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 3.0)
    with pytest.raises(RuntimeError, match="no weights for me"):
        Binding(target, "state_dict").write(Binding(source).read())
    assert {v for t in values(target).values() for v in t.flatten().tolist()} == {1.0}
