"""Trained tensors that no module registers, so that none of them would be sent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from sync_core import ModelError, Sender, gathered
from sync_plugin_std import select


class Policy(nn.Module):
    """A module with whatever attributes a test gives it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)


class Hides(Policy):
    """A module that trains what it does not name."""

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        named = super().named_parameters(*args, **options)
        return ((name, tensor) for name, tensor in named if "bias" not in name)


def trained() -> Tensor:
    return torch.zeros(2, requires_grad=True)


def make_sender(model: Any, **options: Any) -> None:
    with Sender("none", model, num_workers=1, **options) as sender:
        assert sender.send().updated == (0,)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Policy(log_std=trained()), "log_std"),
        (lambda: Policy(log_stds=(trained(),)), "log_stds[0]"),
        (lambda: Policy(heads={"a": [nn.Parameter(torch.ones(1))]}), "heads['a'][0]"),
        (lambda: Policy(layers=[nn.Linear(2, 2)]), "layers[0].weight"),
        (lambda: nn.Sequential(Policy(log_std=trained())), "0.log_std"),
        (lambda: {"a": nn.Linear(2, 2), "b": Policy(log_std=trained())}, "b.log_std"),
        (lambda: gathered(Policy(log_std=trained())), "log_std"),
    ],
)
@pytest.mark.parametrize("strategy", ["tensordict", "checkpoint", "state_dict"])
def test_a_trained_tensor_that_is_not_registered_is_refused_by_name(
    make: Callable[[], Any], name: str, strategy: Any
) -> None:
    with pytest.raises(ModelError) as caught:
        make_sender(make(), strategy=strategy)
    assert str(caught.value).startswith(f"{name!r} requires a gradient")


def test_a_model_that_is_registered_later_is_checked_too() -> None:
    sender = Sender("none", nn.Linear(2, 2), num_workers=1)
    with sender, pytest.raises(ModelError, match="log_std"):
        sender.register_model(Policy(log_std=trained()))


def test_a_parameter_that_named_parameters_leaves_out_is_named() -> None:
    with pytest.raises(ModelError, match=r"'net\.bias' is a parameter.*strategy='state_dict'"):
        make_sender(Hides())
    make_sender(Hides(), strategy="state_dict")
    make_sender(dict(Hides().state_dict()))


def parent() -> Any:
    child: Any = Policy()
    outer = nn.Sequential(child, nn.Linear(2, 2))
    child.parent, child.trainer = [outer], {"model": outer}
    return child


def cyclic() -> Any:
    found: list[Any] = []
    found.append(found)
    return Policy(found=found)


def listed_twice() -> Any:
    model: Any = Policy()
    model.layers, model.weights = [model.net], {"w": model.net.weight}
    return model


def cached() -> Any:
    model: Any = Policy()
    model.last, model.loss = model.net(torch.ones(2)), [model.net.weight.sum()]
    model.optimizer = torch.optim.SGD([trained()])
    model.frozen, model.view = torch.ones(2), model.net.weight.detach().requires_grad_()
    model.target = [copy.deepcopy(model.net).requires_grad_(False)]
    return model


def pruned() -> Any:
    model: Any = Policy()
    prune.l1_unstructured(model.net, "weight", 1)
    return model


def tied() -> Any:
    model: Any = Policy(other=nn.Linear(2, 2))
    model.other.weight = model.net.weight
    return model


@pytest.mark.parametrize(
    "make",
    [
        parent,
        cyclic,
        listed_twice,
        cached,
        pruned,
        tied,
        lambda: nn.LSTM(2, 2),
        lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
        lambda: parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"),
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        lambda: nn.ParameterDict({"a": trained()}),
        lambda: nn.DataParallel(nn.Linear(2, 2)),
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 1),
    ],
)
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
def test_what_is_registered_or_not_trained_is_not_refused(
    make: Callable[[], nn.Module], strategy: Any
) -> None:
    make_sender(make(), strategy=strategy)


def test_a_layer_that_sends_a_part_may_leave_the_rest_unregistered() -> None:
    make_sender(Policy(log_std=trained()), layers=[select("net.*")])
