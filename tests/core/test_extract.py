"""Extraction: named tensors from modules, TensorDicts, state_dicts and string references."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from sync_core import ModelError, ModelPathError, Receiver, Sender, Update
from sync_core.errors import PayloadError
from sync_core.models import Binding, named_tensors, resolve


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("absent", None)


class WithExtraState(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_a_module_gives_parameters_and_all_buffers(strategy: Any) -> None:
    named = named_tensors(nn.Sequential(WithBuffers()), strategy)
    assert set(named) == {"0.weight", "0.kept", "0.scratch"}


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_extra_state_of_tensors_travels(strategy: Any) -> None:
    state = {"mean": torch.ones(2), "counts": [torch.tensor(1), torch.tensor(2)]}
    named = named_tensors(nn.Sequential(WithExtraState(state)), strategy)
    assert set(named) == {
        "0.weight",
        "0._extra_state.mean",
        "0._extra_state.counts.0",
        "0._extra_state.counts.1",
    }


def test_extra_state_of_something_else_is_an_error_that_names_it() -> None:
    with pytest.raises(ModelError, match=r"'_extra_state\.ids' is or holds a set; .* return these"):
        named_tensors(WithExtraState({"ids": {1, 2}}))


def test_extra_state_as_json_comes_back_as_it_was() -> None:
    state: list[Any] = [
        1 << 70,
        {"a": (b"\xff", {}), 2: [None, "é\ud800"]},
        torch.ones(2),
        float("-inf"),
    ]
    target = WithExtraState([0, {}, torch.zeros(2), 0.0])
    Binding(target).write(Binding(WithExtraState(state)).read())
    assert repr(target.state) == repr(state)
    longer = named_tensors(WithExtraState({**state[1], "text": "x" * 1000}))
    assert longer["_extra_state.__json__"].shape == (2048,)


@pytest.mark.parametrize("text", [b"[", b'{"tensor": 3}', b'{"code": "x"}', b"[" * 100_000])
def test_extra_state_that_is_no_json_of_ours_is_refused(text: bytes) -> None:
    json = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sent = Update.of({"weight": torch.zeros(2), "_extra_state.__json__": json})
    target = WithExtraState(3)
    with pytest.raises(PayloadError, match="'_extra_state' arrived as JSON that is not a state"):
        Binding(target).write(sent)
    assert target.weight.eq(1).all()


def test_extra_state_that_a_state_dict_cannot_take_is_an_error() -> None:
    source, target = WithExtraState({"steps": 5}), WithExtraState({"steps": 1}).state_dict()
    with pytest.raises(ModelError, match="give the module instead of its state_dict"):
        Binding(target).write(Binding(source).read())
    Binding(source).write(Binding(target).read())
    assert source.state == {"steps": 1}


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        # torch advertises another library.
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_weights_that_are_in_no_tensor_are_an_error_on_either_side(strategy: Any) -> None:
    refused = r"'0\._packed_params.* is a .* before it was quantized"
    with (
        pytest.raises(ModelError, match=refused),
        Sender("thread", {"policy": quantized()}, num_workers=1, strategy=strategy),
    ):
        pass
    plain = {"policy": nn.Sequential(nn.Identity(), nn.LayerNorm(2))}
    with (
        Sender("thread", plain, num_workers=1, strategy=strategy) as sender,
        pytest.raises(ModelError, match=refused),
    ):
        Receiver(sender.address(0), {"policy": quantized()})
    with pytest.raises(ModelError, match=refused):
        named_tensors({"policy": quantized()}, strategy)


def test_what_a_module_saves_is_not_asked_for_again_while_it_is_the_same() -> None:
    class Saving(nn.Linear):
        saved = 0

        def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
            super()._save_to_state_dict(*args, **options)
            self.saved += 1

    module = Saving(2, 2)
    binding = Binding(module)
    update = Update.of(dict(module.named_parameters()))
    binding.write(update)
    before = module.saved
    binding.read()
    binding.write(update)
    assert module.saved == before


def test_modules_save_in_any_way_that_torch_lets_them() -> None:
    class Saving(nn.Linear):
        def _save_to_state_dict(self, into: Any, *prefix_and_so_on: Any) -> None:
            super()._save_to_state_dict(into, *prefix_and_so_on)
            into.move_to_end(f"{prefix_and_so_on[0]}weight")
            into._metadata[prefix_and_so_on[0][:-1]]["by"] = "me"

    for module in (Saving(2, 2), nn.Sequential(Saving(2, 2))):
        assert set(named_tensors(module)) == set(module.state_dict())


def test_the_state_dict_strategy_honours_the_modules_hooks() -> None:
    module = nn.Linear(2, 2)

    def without_bias(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        del state[prefix + "bias"]

    module.register_state_dict_post_hook(without_bias)
    assert set(named_tensors(module, "state_dict")) == {"weight"}
    assert set(named_tensors(module, "tensordict")) == {"weight", "bias"}


def test_modules_in_a_mapping_are_read_like_modules_alone() -> None:
    models = {"a": WithBuffers(), "b": {"c": WithExtraState([torch.tensor(1)])}}
    expected = {"a.weight", "a.kept", "a.scratch", "b.c.weight", "b.c._extra_state.0"}
    assert set(named_tensors(models)) == expected
    assert set(named_tensors(models, "state_dict")) == expected
    with pytest.raises(ModelError, match=r"two tensors are named 'a\.weight'"):
        named_tensors({**models, "a.weight": torch.ones(2)})


def test_parametrized_modules_travel_by_their_originals() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert set(named_tensors(module)) == {
        "bias",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    }


def test_flat_and_nested_state_dicts_and_tensordicts_name_alike() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    expected = {"0.weight", "0.bias", "1.weight", "1.bias"}
    flat = module.state_dict()
    nested = {"0": {"weight": flat["0.weight"], "bias": flat["0.bias"]}}
    nested["1"] = OrderedDict(weight=flat["1.weight"], bias=flat["1.bias"])
    assert set(named_tensors(flat)) == expected
    assert set(named_tensors(nested)) == expected
    assert set(named_tensors(TensorDict.from_module(module))) == expected
    assert set(named_tensors(TensorDict(flat))) == expected


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({0: torch.ones(1)}, "names that are strings"),
        ({"a": {"b": 1.0}}, r"'a\.b' is a float"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"two tensors are named 'a\.b'"),
        ([torch.ones(1)], "cannot read weights from a list"),
        (None, "cannot read weights from a NoneType"),
    ],
)
def test_other_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        named_tensors(weights)


def test_paths_lead_through_attributes_indices_and_keys() -> None:
    root = SimpleNamespace(env=SimpleNamespace(transform=[1, 2]), heads={"a.b": nn.Identity()})
    assert resolve(root, "env.transform[-1]") == 2
    assert resolve(root, "heads['a.b']") is root.heads["a.b"]
    assert resolve(root, 'heads["a.b"].training') is True


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("env.nothing", "'env', a SimpleNamespace, has no 'nothing'"),
        ("env.transform[5]", r"'env\.transform', a list, has no '\[5\]'"),
        ("heads['x']", r"'heads', a dict, has no \"\['x'\]\""),
        ("env..transform", "cannot read"),
        ("env.transform[x]", "cannot read"),
        ("missing", "'the root', a SimpleNamespace, has no 'missing'"),
    ],
)
def test_a_path_that_leads_nowhere_names_the_step(path: str, message: str) -> None:
    root = SimpleNamespace(env=SimpleNamespace(transform=[1, 2]), heads={})
    with pytest.raises(ModelPathError, match=message):
        resolve(root, path)


class _Broken(nn.Module):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    @property
    def policy(self) -> Any:
        if self.error is None:
            return [].missing  # type: ignore[attr-defined]
        raise self.error


@pytest.mark.parametrize(
    "error",
    [KeyError("a"), IndexError("b"), TypeError("c"), AttributeError("d"), LookupError("e")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_inside_a_property_is_raised_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        resolve([_Broken(error)], "[0].policy.net")
    assert raised.value is error


def test_an_attribute_that_a_property_lacks_is_named() -> None:
    with pytest.raises(AttributeError, match="'list' object has no attribute 'missing'"):
        resolve(_Broken(), "policy")


@pytest.mark.long
def test_who_collects_nothing_does_not_wait_for_tensordict() -> None:
    source = """
import sys, sync_core, sync_tools.commands, sync_testing.schemes
assert "tensordict" not in sys.modules
assert not sync_core.models.lookup.is_tensordict({})
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=50)
