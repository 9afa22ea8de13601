"""A module that loads weights in its own way is loaded so, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sync_core import LayoutMismatchError, ModelError, Receiver, Sender


class Turned(nn.Linear):
    """Holds its weight turned."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Outer(nn.Sequential):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        turned = {name: value.t() for name, value in state_dict.items()}
        return super().load_state_dict(turned, *args, **kwargs)


def plain() -> Any:
    return nn.Sequential(nn.Linear(3, 3, bias=False))


def overridden() -> Any:
    return nn.Sequential(Turned(3, 3, bias=False))


def outermost() -> Any:
    return Outer(nn.Linear(3, 3, bias=False))


def before() -> Any:
    def turn(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        del module, args
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    model = plain()
    model[0].register_load_state_dict_pre_hook(turn)
    return model


def after() -> Any:
    def turn(module: nn.Module, keys: Any) -> None:
        del keys
        module.weight.data.copy_(module.weight.data.t().clone())  # type: ignore[operator]

    model = plain()
    model[0].register_load_state_dict_post_hook(turn)
    return model


@pytest.mark.parametrize("make", [overridden, outermost, before, after])
@pytest.mark.parametrize("given", ["module", "mapping", "reference", "layers"])
def test_own_loading_is_refused_or_followed(make: Callable[[], Any], given: str) -> None:
    source: Any = {"a": plain()} if given == "mapping" else plain()
    target = make()
    model: Any = {"a": target} if given == "mapping" else target
    options: dict[str, Any] = {"layers": ["bf16"]} if given == "layers" else {}
    held = target[0].weight.clone()

    def receive(strategy: Any) -> None:
        with Sender("thread", source, num_workers=1, strategy=strategy, **options) as sender:
            pending = None if given != "reference" else sender.send_async()
            context: dict[str, Any] = (
                {"context": SimpleNamespace(model=model)} if given == "reference" else {}
            )
            found = "model" if given == "reference" else model
            with Receiver(sender.address(0), found, **context) as receiver:
                pending = pending or sender.send_async()
                receiver.receive()
                pending.wait()

    with pytest.raises(ModelError, match=r"its own \w*load|a load hook") as raised:
        receive("tensordict")
    assert "strategy='state_dict'" in str(raised.value)
    assert torch.equal(target[0].weight, held)
    receive("state_dict")
    sent = (source["a"] if given == "mapping" else source)[0].weight
    assert torch.allclose(target[0].weight, sent.t(), atol=0.01)


def with_compatibility_hooks() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(4),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.MultiheadAttention(4, 2),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.utils.spectral_norm(nn.Linear(4, 4)),
        nn.utils.weight_norm(nn.Linear(4, 4)),
        nn.LSTM(2, 2),
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_loading_of_torch_s_own_modules_is_no_obstacle() -> None:
    with Sender("thread", with_compatibility_hooks(), num_workers=1) as sender:
        target = torch.compile(with_compatibility_hooks(), backend="eager")
        with Receiver(sender.address(0), target) as receiver:
            pending = sender.send_async()
            assert receiver.receive() == 1
            assert pending.wait().updated == (0,)


def test_an_averaged_model_is_answered_by_its_module() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(plain())
    with (
        Sender("thread", averaged, num_workers=1) as sender,
        pytest.raises(LayoutMismatchError, match=r"averaged\.module"),
    ):
        Receiver(sender.address(0), plain())
