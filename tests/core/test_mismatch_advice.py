"""The advice of errors about workers with more tensors than are sent, followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sync_core import LayoutMismatchError, Receiver, Sender


class Rotary(nn.Module):
    """A model with a buffer that checkpoints leave out."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)
        nn.init.constant_(self.proj.weight, value)
        self.register_buffer("inv_freq", torch.full((3,), value), persistent=False)


def push(sender: Sender, receiver: Receiver) -> None:
    pending = sender.send_async()
    receiver.receive()
    pending.wait()


@pytest.mark.parametrize("several", [False, True])
def test_a_checkpoint_fits_a_model_that_computes_more(several: bool) -> None:
    model = Rotary(1.0)
    target: Any = {"policy": model} if several else model
    weights = {f"policy.{n}" if several else n: t for n, t in Rotary(2.0).state_dict().items()}
    with (
        Sender("thread", weights, num_workers=1) as sender,
        pytest.raises(LayoutMismatchError, match=r"inv_freq' is in.*\n.* strategy=\"checkpoint\""),
    ):
        Receiver(sender.address(0), target)
    with Sender("thread", weights, num_workers=1, strategy="checkpoint") as sender:
        push(sender, Receiver(sender.address(0), target))
    assert model.proj.weight.eq(2.0).all()
    assert torch.equal(model.get_buffer("inv_freq"), torch.ones(3))


def test_a_part_of_a_model_can_be_given() -> None:
    model = nn.ModuleDict({"actor": nn.Linear(2, 2), "value": nn.Linear(2, 1)})
    weights = {"actor.weight": torch.ones(2, 2), "actor.bias": torch.ones(2)}
    with Sender("thread", weights, num_workers=1) as sender:
        address = sender.address(0)
        with pytest.raises(LayoutMismatchError, match=r"model.state_dict\(\).*address.layout.inde"):
            Receiver(address, model)
        named = {n: t for n, t in model.state_dict().items() if n in address.layout.index}
        push(sender, Receiver(address, named))
    assert model.get_parameter("actor.weight").eq(1.0).all()
