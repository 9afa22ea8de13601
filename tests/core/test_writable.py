"""A model into which weights cannot be written: its tensors share memory, or are not held."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import nn

from sync_core import LayoutMismatchError, ModelError, Receiver, Sender, SendError, Update
from sync_core.models import Binding


def linears(width: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))


def over(first: torch.Tensor, second: torch.Tensor) -> nn.Sequential:
    """Two layers whose weights are these."""
    model = linears(len(first))
    model[0].weight, model[1].weight = nn.Parameter(first), nn.Parameter(second)
    return model


def transposed() -> nn.Sequential:
    weight = torch.randn(3, 3)
    return over(weight, weight.t())


def sliced() -> nn.Sequential:
    base = torch.randn(15)
    return over(base[:9].view(3, 3), base[6:].view(3, 3))


def strided() -> nn.Sequential:
    base = torch.randn(3, 8)
    return over(base[:, :3], base[:, 2:5])


def negated() -> nn.Sequential:
    weight = torch.randn(3, 3)
    return over(weight, torch._neg_view(weight))


OVERLAPS = [transposed, sliced, strided, negated]


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    now = model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("make", OVERLAPS)
def test_two_tensors_that_overlap_are_named_and_nothing_is_written(
    make: Callable[[], nn.Module], zero_copy: bool, strategy: Any
) -> None:
    model = make()
    before, pointers = snapshot(model), [p.data_ptr() for p in model.parameters()]
    binding = Binding(model, strategy)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"'0\.weight' and '1\.weight' share memory.*clone"):
            binding.write(Binding(linears()).read(), zero_copy=zero_copy)
    assert_same(model, before)
    assert [p.data_ptr() for p in model.parameters()] == pointers


@pytest.mark.parametrize("make", OVERLAPS)
@pytest.mark.parametrize("zero_copy", [False, True])
def test_one_that_comes_to_overlap_later(make: Callable[[], nn.Module], zero_copy: bool) -> None:
    model: Any = linears()
    model.register_buffer("first", torch.zeros(3, 3))
    model.register_buffer("second", torch.zeros(3, 3))
    source = copy.deepcopy(model)
    binding = Binding(model)
    binding.write(Binding(source).read(), zero_copy=zero_copy)
    for kind in ("data", "object"):
        first, second = make().parameters()
        if kind == "data":
            model.first.data, model.second.data = first.data, second.data
        else:
            model.first, model.second = first.data, second.data
        with pytest.raises(ModelError, match="'first' and 'second' share memory"):
            binding.write(Binding(source).read(), zero_copy=zero_copy)
        model.second = model.second.clone()
        binding.write(Binding(source).read(), zero_copy=zero_copy)
        assert_same(model, source.state_dict())


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_buffer_that_views_a_part_of_a_parameter(zero_copy: bool) -> None:
    model, source = nn.Linear(3, 3), nn.Linear(3, 3)
    model.register_buffer("row", torch.zeros(3))
    source.register_buffer("row", torch.ones(3))
    binding = Binding(model)
    binding.write(Binding(source).read(), zero_copy=zero_copy)
    model.row = model.weight.data[1]
    with pytest.raises(ModelError, match="'weight' and 'row' share memory"):
        binding.write(Binding(source).read(), zero_copy=zero_copy)


def test_the_worker_keeps_its_version_and_the_trainer_is_told_why() -> None:
    model = linears()
    with Sender("thread", linears(), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), model)
        pending = sender.send_async()
        assert receiver.receive() == 1
        pending.wait()
        first, second = transposed().parameters()
        model[0].weight.data, model[1].weight.data = first.data, second.data
        before = snapshot(model)
        pending = sender.send_async()
        with pytest.raises(ModelError, match="share memory"):
            receiver.receive()
        with pytest.raises(SendError, match="share memory"):
            pending.wait()
        assert receiver.version == 1
        assert_same(model, before)


FLAT = torch.arange(72.0)
APART: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "slices of a flat tensor": (FLAT[:9].view(3, 3), FLAT[9:18].view(3, 3)),
    "columns": (FLAT.view(12, 6)[:3, :3], FLAT.view(12, 6)[:3, 3:]),
    "every other": (FLAT[:18:2].view(3, 3), FLAT[1:19:2].view(3, 3)),
    "transposed columns": (FLAT.view(12, 6)[:3, :3].t(), FLAT.view(12, 6)[:3, 3:]),
}


@pytest.mark.parametrize("tensors", APART.values(), ids=APART)
def test_tensors_that_lie_apart_in_one_storage_are_written(
    tensors: tuple[torch.Tensor, torch.Tensor],
) -> None:
    base = FLAT.clone()
    model = over(*(base.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors))
    source = linears()
    Binding(model).write(Binding(source).read())
    assert_same(model, source.state_dict())


def test_parts_of_complex_tensors_and_other_dtypes_in_one_storage() -> None:
    parts = torch.zeros(4, dtype=torch.complex64)
    raw = torch.zeros(64, dtype=torch.uint8)
    model = {
        "real": parts.real,
        "imag": parts.imag,
        "double": raw[:8].view(torch.float64),
        "half": raw[8:16].view(torch.float16),
        "byte": raw[16:17],
    }
    Binding(model).write(Update.of({name: torch.ones_like(t) for name, t in model.items()}))
    assert all(tensor.eq(1).all() for tensor in model.values())
    with pytest.raises(ModelError, match="'parts' and 'imag' share memory"):
        Binding({"parts": parts, "imag": parts.imag}).write(
            Update.of({"parts": torch.ones(4, dtype=torch.complex64), "imag": torch.ones(4)})
        )


def test_tied_tensors_are_one() -> None:
    weight = nn.Parameter(torch.zeros(3, 3))
    tied = {"a": weight, "b": weight, "c": nn.Parameter(weight.detach())}
    Binding(tied).write(Update.of(dict.fromkeys("abc", torch.ones(3, 3))))
    assert weight.eq(1).all()
    with pytest.raises(LayoutMismatchError, match="one tensor in the model and two"):
        Binding(tied).write(Update.of({name: torch.ones(3, 3) for name in "abc"}))


@pytest.mark.parametrize("zero_copy", [False, True])
def test_tensors_that_are_tied_after_a_commit_are_one(zero_copy: bool) -> None:
    target = linears(3)
    binding = Binding(target)
    update = Binding(linears(3)).read()
    binding.write(update, zero_copy=zero_copy)
    target[1].weight = target[0].weight
    with pytest.raises(LayoutMismatchError, match="one tensor in the model and two"):
        binding.write(update, zero_copy=zero_copy)


def test_tied_tensors_stay_tied_when_a_zero_copy_receiver_leaves() -> None:
    def tied(value: float) -> nn.ParameterDict:
        weight = nn.Parameter(torch.full((3,), value))
        return nn.ParameterDict({"a": weight, "b": nn.Parameter(weight.detach())})

    model = tied(0.0)
    with Sender("thread", tied(1.0), num_workers=1, zero_copy=True) as sender:
        with Receiver(sender.address(0), model) as receiver:
            pending = sender.send_async()
            receiver.receive()
            pending.wait()
            lent = model["a"].data_ptr()
        assert model["a"].data_ptr() == model["b"].data_ptr() != lent
        assert model["b"].eq(1).all()


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view])
def test_a_view_that_negates_is_not_tied_to_what_it_views(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    source = {"a": values, "b": view(values)}
    target = {"a": torch.zeros_like(values), "b": torch.zeros_like(values)}
    Binding(target).write(Binding(source).read())
    assert torch.equal(target["b"], view(values))
    assert not torch.equal(target["a"], target["b"])


def test_one_that_was_tied_and_negates_where_it_lies_is_sent_as_what_it_shows() -> None:
    shared = torch.ones(3)
    source = nn.ParameterDict({"a": nn.Parameter(shared), "b": nn.Parameter(shared)})
    binding = Binding(source)
    assert binding.layout.aliases
    source["b"].data = torch._neg_view(shared)
    assert torch.equal(dict(binding.read().items())["b"], -shared)


def test_many_slices_of_one_tensor_are_looked_at_in_turn() -> None:
    base = torch.zeros(4096, 64)
    columns: dict[str, Any] = {str(number): base[:, number] for number in range(64)}
    ones = {name: torch.ones(4096) for name in columns}
    Binding(columns).write(Update.of(ones))
    assert base.eq(1).all()
    with pytest.raises(ModelError, match="'5' and 'other' share memory"):
        Binding(columns | {"other": base[7:9, 5]}).write(Update.of(ones | {"other": torch.ones(2)}))


@pytest.mark.parametrize(
    ("shape", "stride"), [((2, 3), (1, 1)), ((3, 2), (0, 1)), ((2, 2, 2), (3, 2, 1))]
)
def test_a_tensor_that_overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    tensor = torch.zeros(16).as_strided(shape, stride)
    with pytest.raises(ModelError, match=r"'w' was made by expand.*clone"):
        Binding({"w": tensor}).write(Update.of({"w": torch.ones(shape)}))


def test_strides_that_look_as_if_they_overlap() -> None:
    tensor = torch.zeros(16).as_strided((3, 2), (2, 3))
    values = torch.arange(6.0).view(3, 2)
    Binding({"w": tensor}).write(Update.of({"w": values}))
    assert torch.equal(tensor, values)


def test_one_that_was_expanded_where_it_lies() -> None:
    model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(3)})
    binding = Binding(model)
    ones = Update.of({"a": torch.ones(2), "b": torch.ones(3)})
    binding.write(ones)
    model["b"].data = model["b"].data[:1].expand(3)
    model["a"].data.zero_()
    with pytest.raises(ModelError, match="'b' was made by expand"):
        binding.write(ones)
    assert not model["a"].any()


class MadeAnew(Mapping[str, torch.Tensor]):
    """Weights that are computed whenever they are asked for."""

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.zeros(2, 3)


def stacked() -> TensorDictBase:
    parts = [TensorDict({"a": torch.zeros(3)}) for _ in range(2)]
    return LazyStackedTensorDict.lazy_stack(parts)


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("make", [MadeAnew, stacked])
def test_a_model_that_makes_its_tensors_anew(make: Callable[[], Any], zero_copy: bool) -> None:
    model = make()
    for target, name in ((model, "a"), ({"policy": model}, "policy.a")):
        binding = Binding(target)
        for _ in range(2):
            with pytest.raises(ModelError, match=f"'{name}' is recomputed"):
                binding.write(Update.of({name: torch.ones(2, 3)}), zero_copy=zero_copy)
    assert Binding(model).read().layout.names == ("a",)
