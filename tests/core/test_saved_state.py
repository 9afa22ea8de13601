"""State that modules save besides their tensors, replaced dicts, and parameters without values."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import LayoutMismatchError, ModelError, Receiver, Sender, SendError
from sync_core.models import Binding, named_tensors

STRATEGIES: tuple[Any, ...] = ("tensordict", "checkpoint")


class Scaled(nn.Linear):
    """A module that keeps a scale in an attribute, and saves it as quantized modules do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.ones(2)

    def _save_to_state_dict(self, into: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(into, prefix, keep_vars)
        into[f"{prefix}weight.scale"] = self.scale


class LoadsScale(Scaled):
    """The same, and it loads the scale."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        scale = state.pop(f"{prefix}weight.scale", None)
        if scale is not None:
            self.scale = scale.clone()
        super()._load_from_state_dict(state, prefix, *args)


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    scale = torch.ones(2)

    def hook(_module: Any, state: Any, prefix: str, _metadata: Any) -> None:
        state[f"{prefix}weight.scale"] = scale

    module.register_state_dict_post_hook(hook)
    return module


class SavesState(nn.Linear):
    """A module that overrides `state_dict` itself."""

    def state_dict(self, **options: Any) -> Any:
        state = super().state_dict(**options)
        state[f"{options.get('prefix', '')}weight.scale"] = torch.ones(2)
        return state


def patched() -> nn.Module:
    """A module whose instance saves more."""
    module: Any = nn.Linear(2, 2)
    save = module._save_to_state_dict

    def more(into: Any, prefix: str, keep_vars: bool) -> None:
        save(into, prefix, keep_vars)
        into[f"{prefix}weight.scale"] = torch.ones(2)

    module._save_to_state_dict = more
    return nn.Sequential(module)[0]


class SavesExtraState(nn.Linear):
    """A module that saves extra state without `get_extra_state`."""

    def _save_to_state_dict(self, into: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(into, prefix, keep_vars)
        into[f"{prefix}_extra_state"] = torch.ones(2)


class CannotBeSaved(nn.Linear):
    """A module as bitsandbytes' `Embedding8bit`."""

    def _save_to_state_dict(self, *_: Any) -> None:
        raise NotImplementedError("saving is not implemented")


SAVING: dict[str, Callable[[], nn.Module]] = {
    "own method": Scaled,
    "hook": hooked,
    "own state_dict": partial(SavesState, 2, 2),
    "instance": patched,
    "extra state by hand": partial(SavesExtraState, 2, 2),
    "cannot be saved": partial(CannotBeSaved, 2, 2),
}


@pytest.mark.parametrize("make", SAVING.values(), ids=SAVING)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_saved_and_not_held_is_an_error_at_either_end(
    make: Callable[[], nn.Module], strategy: Any
) -> None:
    refused = r"0(\.weight\.scale'|\._extra_state'| \(a CannotBeSaved\))[\s\S]*quantized"
    with pytest.raises(ModelError, match=refused):
        Sender("thread", nn.Sequential(make()), num_workers=1, strategy=strategy)
    with pytest.raises(ModelError, match=refused):
        Sender("thread", {"a": nn.Sequential(make())}, num_workers=1, strategy=strategy)
    plain = nn.Sequential(nn.Linear(2, 2))
    with Sender("thread", plain, num_workers=1, strategy=strategy) as sender:
        with pytest.raises(ModelError, match=refused):
            sender.send(nn.Sequential(make()))
        with pytest.raises(ModelError, match=refused):
            Receiver(sender.address(0), nn.Sequential(make()))


def test_a_hook_may_rename_and_leave_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2))

    def hook(_module: Any, state: Any, prefix: str, _metadata: Any) -> None:
        state[f"{prefix}plain"] = state.pop(f"{prefix}0.weight").detach()
        del state[f"{prefix}0.bias"]

    module.register_state_dict_post_hook(hook)
    assert set(named_tensors(module)) == {"0.weight", "0.bias"}


@contextmanager
def connected(source: Any, target: Any, **options: Any) -> Iterator[Callable[[], None]]:
    """A function that sends and receives."""
    with Sender("thread", source, num_workers=1, timeout=10, **options) as sender:
        receiver = Receiver(sender.address(0), target)

        def send() -> None:
            pending = sender.send_async()
            receiver.receive()
            pending.wait()

        yield send
        receiver.close()


def test_the_state_dict_strategy_sends_what_is_saved_where_it_is_loaded() -> None:
    source, target = LoadsScale(), LoadsScale()
    source.scale = torch.full((2,), 3.0)
    with connected(source, target, strategy="state_dict") as send:
        send()
    assert target.scale.tolist() == [3.0, 3.0]


class KeepsScale(Scaled):
    """The same, and it keeps the tensor that it loads."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.scale = state.pop(f"{prefix}weight.scale")
        super()._load_from_state_dict(state, prefix, *args)


class Assigns(nn.Linear):
    """A module whose parameters become the tensors that it loads."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = True) -> Any:
        return super().load_state_dict(state_dict, strict, assign)


@pytest.mark.parametrize("scheme", ["thread", "shm"])
@pytest.mark.parametrize("kind", [KeepsScale, Assigns])
def test_what_a_module_keeps_of_a_state_dict_stays_as_it_was_loaded(
    scheme: str, kind: type[nn.Module]
) -> None:
    source, target = kind(), kind()

    def show(module: nn.Module) -> list[float]:
        return [t.unique().item() for t in named_tensors(module, "state_dict").values()]

    def fill(value: float) -> None:
        for tensor in named_tensors(source, "state_dict").values():
            tensor.detach().fill_(value)

    with Sender(scheme, source, num_workers=1, strategy="state_dict", timeout=30) as sender:
        receiver = Receiver(sender.address(0), target)
        for version in range(1, 8):
            fill(version)
            pending = sender.send_async()
            if version == 1:
                assert receiver.receive(30) == 1
            pending.abandon()
            assert set(show(target)) == {1.0}
        receiver.close()


class WritesWhenSaved(nn.Linear):
    """A module that writes a buffer when it is saved, and reads that when it is loaded."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = 1.0
        self.saved: Tensor
        self.register_buffer("saved", torch.ones(()))
        untyped: Any = self
        untyped.register_state_dict_pre_hook(lambda *_: self.saved.fill_(self.scale))
        untyped.register_load_state_dict_post_hook(lambda *_: self.load())

    def load(self) -> None:
        self.scale = self.saved.item()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_that_run_before_a_state_dict_need_the_state_dict_strategy(strategy: Any) -> None:
    source, target = WritesWhenSaved(), WritesWhenSaved()
    source.scale = 3.0
    with pytest.raises(ModelError, match=r"WritesWhenSaved\) has a hook.*strategy='state_dict'"):
        Sender("thread", nn.Sequential(source), num_workers=1, strategy=strategy)
    with connected(source, target, strategy="state_dict") as send:
        send()
    assert target.scale == 3.0


def test_a_buffer_that_is_saved_all_the_same_is_not_left_out_of_checkpoints() -> None:
    class Saves(LoadsScale):
        def __init__(self) -> None:
            super().__init__()
            del self.scale
            self.register_buffer("scale", torch.ones(2), persistent=False)

        def _save_to_state_dict(self, into: Any, prefix: str, keep_vars: bool) -> None:
            nn.Linear._save_to_state_dict(self, into, prefix, keep_vars)
            into[f"{prefix}scale"] = self.scale

    assert "scale" in named_tensors(Saves())
    with pytest.raises(ModelError, match=r"'scale', which the module \(a Saves\) saves"):
        named_tensors(Saves(), "checkpoint")


def test_the_state_dict_strategy_refuses_what_is_not_loaded() -> None:
    source, target = Scaled(), Scaled()
    before = target.weight.clone()
    with (
        Sender("thread", source, num_workers=1, timeout=10, strategy="state_dict") as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        pending = sender.send_async()
        with pytest.raises(ModelError, match="its load_state_dict does not take"):
            receiver.receive()
        with pytest.raises(SendError, match="does not take"):
            pending.wait()
    assert torch.equal(target.weight, before)


class Wrapped(OrderedDict[str, Any]):
    """A dict like the one with which DeepSpeed replaces `_parameters`."""


def take_over(module: Any) -> None:
    other = nn.Linear(2, 2)
    nn.init.constant_(other.weight, 7.0)
    module.__dict__.update(copy.deepcopy(other).__dict__)


def wrap(module: Any) -> None:
    module.__dict__["_parameters"] = Wrapped(module._parameters)
    module.weight = nn.Parameter(torch.full((2, 2), 7.0))


def set_state(module: Any) -> None:
    state = copy.deepcopy(module).__dict__
    state["_parameters"]["weight"] = nn.Parameter(torch.full((2, 2), 7.0))
    module.__setstate__(state)


def parametrize(module: Any) -> None:
    module.weight = nn.Parameter(torch.full((2, 2), 7.0))
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    module._parameters = dict(module._parameters)


REPLACED = (take_over, wrap, set_state, parametrize)


@pytest.mark.parametrize("replace", REPLACED)
@pytest.mark.parametrize("options", [{}, {"zero_copy": True}, {"strategy": "checkpoint"}])
@pytest.mark.parametrize("nested", [False, True])
def test_replaced_dicts_are_read_and_written(
    replace: Callable[[Any], None], options: Any, nested: bool
) -> None:
    source: Any = nn.Sequential(nn.Linear(2, 2))
    target: Any = nn.Sequential(nn.Linear(2, 2))
    models = ({"a": source}, {"a": target}) if nested else (source, target)
    with connected(*models, **options) as send:
        send()
        replace(source[0])
        send()
        assert target[0].weight.tolist() == [[7.0, 7.0]] * 2
        replace(target[0])
        nn.init.constant_(source[0].weight, 3.0)
        send()
        assert target[0].weight.tolist() == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("end", [0, 1])
def test_a_child_that_was_renamed_is_an_error(end: int) -> None:
    models = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"a": nn.Linear(2, 2)})
    with connected(*models) as send:
        send()
        models[end]["b"] = models[end].pop("a")
        with pytest.raises(LayoutMismatchError, match=r"'b\.weight' is in the"):
            send()


@pytest.mark.parametrize("end", [0, 1])
def test_a_class_that_saves_more_is_found(end: int) -> None:
    models: Any = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    with connected(*models) as send:
        send()
        models[end][0].__class__ = SavesState
        with pytest.raises(ModelError, match=r"0\.weight\.scale"):
            send()


def test_buffers_are_found_in_dicts_that_were_empty() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    binding = Binding(model)
    model[1].register_buffer("kept", torch.ones(2))
    assert "1.kept" in binding.layout.names


def partitioned(model: nn.Module) -> nn.Module:
    """A model as DeepSpeed ZeRO-3 leaves it outside of `GatheredParameters`."""
    for i, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = i, parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    return model


def names(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("given", [nn.Sequential, names, lambda model: {"a": model}])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "state_dict"])
def test_partitioned_parameters_are_an_error_at_either_end(given: Any, strategy: Any) -> None:
    refused = "partitioned by DeepSpeed ZeRO-3.*GatheredParameters"
    with pytest.raises(ModelError, match=refused):
        Sender("thread", given(partitioned(nn.Linear(2, 2))), num_workers=1, strategy=strategy)
    model = nn.Linear(2, 2)
    with Sender("thread", given(model), num_workers=1, strategy=strategy) as sender:
        with pytest.raises(ModelError, match=refused):
            Receiver(sender.address(0), given(partitioned(nn.Linear(2, 2))))
        with Receiver(sender.address(0), load=list):
            partitioned(model)
            with pytest.raises(ModelError, match=refused):
                sender.send()


def test_a_state_dict_of_a_partitioned_model_has_nothing_to_send() -> None:
    state = partitioned(nn.Linear(2, 2)).state_dict()
    with pytest.raises(ModelError, match=r"no elements[\s\S]*GatheredParameters"):
        Sender("thread", state, num_workers=1)


def test_the_error_for_offloaded_weights_says_where_they_are() -> None:
    with pytest.raises(ModelError, match="get_state_dict_offloaded_model"):
        Sender("thread", nn.Linear(2, 2, device="meta"), num_workers=1)
