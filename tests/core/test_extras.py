"""Extras of a send: small tensors beside the weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import (
    ApplyContext,
    Layout,
    ModelError,
    Receiver,
    Sender,
    SendError,
    Update,
    hookimpl,
)
from sync_core.transports import RESERVED_PREFIX


class Twice:
    """A layer that reads extras, and adds one."""

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        # Another object, which need not have the extras.
        made = Update(update.layout, update.tensors)
        made.extras["twice.factor"] = torch.tensor(2.0)
        return made

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update) -> Generator[None, bool, bool]:
        factor = update.extras.pop("twice.factor") * update.extras.get("gain", torch.tensor(1.0))
        update.replace([tensor * factor for tensor in update.tensors])
        return (yield)


def test_a_layer_reads_extras_and_adds_its_own() -> None:
    model, copy, seen = nn.Linear(2, 2), nn.Linear(2, 2), []
    with Sender("thread", model, num_workers=1, layers=[Twice()]) as sender:
        receiver = Receiver(sender.address(0), copy, on_commit=lambda _: seen.append(extras()))

        def extras() -> dict[str, float]:
            return {name: tensor.item() for name, tensor in receiver.extras.items()}

        for given in (None, {"gain": torch.tensor(3.0)}):
            pending = sender.send_async(extras=given)
            receiver.receive()
            pending.wait()
        assert seen == [{}, {"gain": 3.0}]
        assert torch.equal(copy.weight, model.weight * 6)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"step": 5}, r"'step' must be a tensor; type torch.tensor\(5\)"),
        ({"sync.base": torch.ones(1)}, "text without dots"),
        ({"step": torch.ones(2)}, r"first ones, step: int64\[\]; got step: float32\[2\]"),
        ({"other": torch.tensor(5)}, "first ones, step"),
        ({"step": torch.ones(1 << 16)}, "may have 65536 bytes, got 262144"),
        ([1], "a mapping from names to tensors"),
    ],
)
def test_extras_that_cannot_travel_say_what_is_wrong(extras: Any, message: str) -> None:
    with Sender("none", nn.Linear(2, 2), num_workers=1) as sender:
        sender.send(extras={"step": torch.tensor(1)})
        with pytest.raises(ModelError, match=message):
            sender.send(extras=extras)
        assert sender.send().version == 2


@pytest.mark.parametrize("scheme", ["increments::shm", "chunked::mp", "increments::file"])
def test_extras_come_through_schemes_that_wrap(scheme: str, tmp_path: Any) -> None:
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    options: dict[str, Any] = {"directory": str(tmp_path)} if "file" in scheme else {}
    with (
        Sender(scheme, model, num_workers=1, **options) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        for step in range(3):
            pending = sender.send_async(extras={"step": torch.tensor(step)})
            receiver.receive()
            pending.wait()
            assert receiver.extras == {"step": torch.tensor(step)}


def test_names_of_extras_are_reserved() -> None:
    with pytest.raises(ModelError, match="reserved"):
        Layout.of({f"{RESERVED_PREFIX}extra.step": torch.ones(1)})


class RaisesAfterwards:
    """A layer that raises once the second version is loaded."""

    @hookimpl(wrapper=True)
    def apply_weights(self, context: ApplyContext) -> Generator[None, bool, bool]:
        loaded = yield
        if context.version == 2:
            raise RuntimeError("after all")
        return loaded


def test_extras_are_those_of_a_version_after_which_a_layer_raised() -> None:
    model, layers = nn.Linear(2, 2), [RaisesAfterwards()]
    with Sender("thread", model, num_workers=1, layers=layers, timeout=60) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        for step in (1, 2):
            pending = sender.send_async(extras={"step": torch.tensor(step)})
            with suppress(RuntimeError):
                receiver.receive(30)
            with suppress(SendError):
                pending.wait()
            assert receiver.version == receiver.extras["step"] == step
        receiver.close()
