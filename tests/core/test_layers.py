"""The interface of layers: what they are given at each end, and how they compose."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Generator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import (
    ApplyContext,
    BindContext,
    LayoutMismatchError,
    Receiver,
    SendContext,
    Sender,
    Update,
    hookimpl,
)
from sync_core.errors import NotAPluginError
from sync_testing import Loopback


class Flat:
    """Sends every tensor flat, and gives it back the shape that it was given in."""

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        update.replace([tensor.detach().reshape(-1) for tensor in update.tensors])
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        assert context.layout is not None
        shapes = {spec.name: spec.shape for spec in context.layout.specs}
        pairs = zip(update.layout.specs, update.tensors, strict=True)
        update.replace([tensor.reshape(shapes[spec.name]) for spec, tensor in pairs])
        return (yield)


class Pairs:
    """Sends every tensor as two halves of it, under two names."""

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        halves: dict[str, Tensor] = {}
        for spec, tensor in zip(update.layout.specs, update.tensors, strict=True):
            flat = tensor.detach().reshape(-1)
            middle = len(flat) // 2
            halves |= {f"{spec.name}.0": flat[:middle], f"{spec.name}.1": flat[middle:]}
        update.rename(halves)
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        assert context.layout is not None
        halves = dict(update.items())
        tensors = [
            torch.cat([halves[f"{spec.name}.0"], halves[f"{spec.name}.1"]]).reshape(spec.shape)
            for spec in context.layout.specs
        ]
        update.become(context.layout, tensors)
        return (yield)


class Renamed:
    """Sends tensors under other names, which the worker's model has; it cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        update.rename({f"model.{name}": tensor for name, tensor in update.items()})
        return update


def policy(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model.to(dtype)


def push(sender: Sender, *receivers: Receiver) -> None:
    pending = sender.send_async()
    for receiver in receivers:
        receiver.receive(0)
    pending.wait(0)


@pytest.mark.parametrize(
    "layers", [*itertools.permutations(["bf16", "flat", "pairs", "renamed"])], ids=" ".join
)
def test_layers_compose_in_any_order(layers: tuple[str, ...]) -> None:
    made = {"bf16": "bf16", "flat": Flat(), "pairs": Pairs(), "renamed": Renamed()}
    target = nn.ModuleDict({"model": policy(0.0, torch.bfloat16)})
    with Sender(
        Loopback(), policy(1.5), num_workers=1, layers=[made[name] for name in layers]
    ) as sender:
        address = pickle.loads(pickle.dumps(sender.address(0)))
        push(sender, Receiver(address, target))
    assert all(torch.equal(p, torch.full_like(p, 1.5)) for p in target.parameters())


@pytest.mark.parametrize(
    ("trainer", "worker"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.half)],
)
@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_worker_keeps_its_dtype(
    trainer: torch.dtype, worker: torch.dtype, *, zero_copy: bool
) -> None:
    target = policy(0.0, worker)
    with Sender(
        "thread", policy(1.5, trainer), num_workers=1, layers=["bf16"], zero_copy=zero_copy
    ) as sender:
        receiver = Receiver(sender.address(0), target)
        push(sender, receiver)
        push(sender, receiver)
    assert all(torch.equal(p, torch.full_like(p, 1.5)) for p in target.parameters())
    assert {p.dtype for p in target.parameters()} == {worker}


def test_without_a_layer_that_casts_dtypes_must_be_equal() -> None:
    with (
        Sender(Loopback(), policy(1.0), num_workers=1) as sender,
        pytest.raises(LayoutMismatchError, match=r'layers=\["bf16"\]'),
    ):
        Receiver(sender.address(0), policy(0.0, torch.bfloat16))


def test_integers_are_never_cast() -> None:
    with (
        Sender(Loopback(), {"n": torch.tensor(1.0)}, num_workers=1, layers=["bf16"]) as sender,
        pytest.raises(LayoutMismatchError, match="int64"),
    ):
        Receiver(sender.address(0), {"n": torch.tensor(1)})


class Bound:
    """Counts at each end what went through it."""

    def __init__(self, made: list[BindContext] | None = None) -> None:
        self.made = made
        self.seen = 0

    def bind(self, context: BindContext) -> Bound:
        if self.made is not None:
            self.made.append(context)
        return Bound()

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        self.seen += 1
        return (yield)

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Generator[None, bool, bool]:
        self.seen += 1
        return (yield)


def test_each_end_of_each_worker_has_its_own_object() -> None:
    made: list[BindContext] = []
    layer = Bound(made)
    with Sender(Loopback(), policy(1.0), num_workers=2, layers=[layer]) as sender:
        push(sender, *(Receiver(sender.address(i), policy(0.0)) for i in range(2)))
    assert [(context.side, context.worker_id) for context in made] == [
        ("sender", -1),
        ("receiver", 0),
        ("receiver", 1),
    ]
    assert layer.seen == 0


def test_what_is_bound_must_have_the_hooks() -> None:
    class Wrong(Bound):
        def bind(self, context: BindContext) -> Any:
            return context

    with pytest.raises(NotAPluginError, match="lacks the hook apply_weights"):
        Sender(Loopback(), policy(1.0), num_workers=1, layers=[Wrong()])


class Watching:
    """Keeps the contexts that layers are given."""

    sent: list[tuple[Any, Mapping[int, int]]]

    def __init__(self) -> None:
        self.sent = []
        self.held: list[int] = []

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        self.sent.append((context.model, dict(context.acknowledged)))
        return (yield)

    @hookimpl(wrapper=True)
    def apply_weights(self, context: ApplyContext) -> Generator[None, bool, bool]:
        self.held.append(context.held)
        return (yield)


def test_what_layers_are_told() -> None:
    layer, model = Watching(), policy(1.0)
    with Sender(Loopback(), model, num_workers=2, layers=[layer]) as sender:
        receivers = [Receiver(sender.address(i), policy(0.0)) for i in range(2)]
        push(sender, *receivers)
        sender.send_async().abandon()
        receivers[0].receive(0)
        push(sender, *receivers)
        pending = sender.send_async(dict(model.state_dict()))
        pending.abandon()
    assert layer.sent == [
        (model, {}),
        (model, {0: 0, 1: 0}),
        (model, {0: 1, 1: 1}),
        (model, {0: 2, 1: 0}),
        (None, {0: 3, 1: 3}),
    ]
    assert layer.held == [0, 0, 1, 2, 1]
