"""Trained tensors that no module registers, so that no send would bring them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from sync_core import ModelError, OptionError, Receiver, Sender, gathered
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
    Sender("thread", model, num_workers=1, **options).close()


def bypassed() -> Any:
    model: Any = Policy()
    object.__setattr__(model, "critic", nn.Linear(2, 2))
    return model


def beside_what_is_sent() -> Any:
    block = torch.zeros(8)
    return Policy(sent=nn.Parameter(block[:4]), rest=block[4:].requires_grad_())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Policy(log_std=trained()), "log_std"),
        (lambda: Policy(log_stds=(trained(),)), "log_stds[0]"),
        (lambda: Policy(heads={"a": [nn.Parameter(torch.ones(1))]}), "heads['a'][0]"),
        (lambda: Policy(heads=TensorDict({"a": trained()})), "heads['a']"),
        (lambda: Policy(layers=[nn.Linear(2, 2)]), "layers[0].weight"),
        (lambda: Policy(layers=[Policy(inner=[trained()])]), "layers[0].net.weight"),
        (lambda: Policy(layers=[Policy(inner=[trained()]).requires_grad_(False)]), "layers[0].inn"),
        (bypassed, "critic.weight"),
        (beside_what_is_sent, "rest"),
        (lambda: nn.Sequential(Policy(log_std=trained())), "0.log_std"),
        (lambda: {"a": nn.Linear(2, 2), "b": Policy(log_std=trained())}, "b.log_std"),
        (lambda: gathered(Policy(log_std=trained())), "log_std"),
    ],
)
@pytest.mark.parametrize("strategy", ["tensordict", "checkpoint", "state_dict"])
def test_a_trained_tensor_that_is_not_registered_is_refused_by_name(
    make: Callable[[], Any], name: str, strategy: Any
) -> None:
    with pytest.raises(ModelError, match="requires a gradient") as caught:
        make_sender(make(), strategy=strategy)
    assert str(caught.value).startswith(f"'{name}") or str(caught.value).startswith(f'"{name}')
    with Sender("chunked::thread", nn.Linear(2, 2), num_workers=1) as sender:
        with pytest.raises(ModelError, match="requires a gradient"):
            sender.register_model(make())
        with pytest.raises(ModelError, match="requires a gradient"):
            sender.send(make())


def test_a_parameter_that_named_parameters_leaves_out_is_named() -> None:
    with pytest.raises(ModelError, match=r"'net\.bias' is a parameter.*strategy='state_dict'"):
        make_sender(Hides())
    make_sender(Hides(), strategy="state_dict")
    make_sender(dict(Hides().state_dict()))


@pytest.mark.parametrize("together", [False, True])
def test_what_another_sender_or_the_same_one_sends_need_not_be_registered(together: bool) -> None:
    def make() -> tuple[Any, Any]:
        critic = nn.Linear(2, 2)
        return Policy(advisers=[critic]), critic

    (policy, critic), (mine, my_critic) = make(), make()
    pairs: Any = (
        [({"a": policy, "b": critic}, {"a": mine, "b": my_critic}, {})]
        if together
        else [(policy, mine, {"allow_unregistered": [critic]}), (critic, my_critic, {})]
    )
    for model, own, options in pairs:
        with Sender("thread", model, num_workers=1, **options) as sender:
            pending = sender.send_async()
            with Receiver(sender.address(0), own) as receiver:
                receiver.receive(10.0)
            pending.wait()
    assert torch.equal(my_critic.weight, critic.weight)
    assert torch.equal(mine.net.weight, policy.net.weight)


@pytest.mark.parametrize("given", [nn.Linear(2, 2), ["critic"], None])
def test_what_may_be_unregistered_is_a_list_of_modules(given: Any) -> None:
    with pytest.raises(OptionError, match=r"allow_unregistered must .*\[critic\], got a"):
        make_sender(nn.Linear(2, 2), allow_unregistered=given)


def parent() -> Any:
    child: Any = Policy()
    outer = nn.Sequential(child, nn.Linear(2, 2))
    child.parent, child.trainer = [outer], {"model": outer}
    return child


def cyclic() -> Any:
    found: list[Any] = []
    found.append(found)
    for _ in range(5000):  # deeper than Python recurses
        found = [found, found]
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
    model.shapes = [nn.Linear(2, 2, device="meta")]
    return model


def in_extra_state() -> Any:
    class Saves(Policy):
        log_std: Tensor

        def get_extra_state(self) -> Any:
            return {"log_std": self.log_std.detach()}

        def set_extra_state(self, state: Any) -> None:
            self.log_std.data.copy_(state["log_std"])

    return Saves(log_std=trained())


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
        in_extra_state,
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
        lambda: {"a": Policy(), "b": nn.Linear(2, 2)},
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


def test_a_layer_that_sends_a_part_changes_nothing() -> None:
    layer, log_std = select("net.*"), trained()
    with pytest.raises(ModelError, match="log_std"):
        make_sender(Policy(log_std=log_std), layers=[layer])
    make_sender(Policy(log_std=log_std), layers=[layer], allow_unregistered=[log_std])
    Sender("none", Policy(log_std=log_std), num_workers=1).close()
