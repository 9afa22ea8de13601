"""The layer Select: workers that lack nothing get what changes; all others get all of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sync_core import ModelError, Receiver, Sender, SendError, SendReport
from sync_core.testing.loopback import Loopback
from sync_plugin_std import Select


def fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)


def net(value: float) -> nn.Sequential:
    """Two layers, of which the first is frozen."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    fill(model, value)
    model[0].requires_grad_(False)
    return model


def push(sender: Sender, *receivers: Receiver) -> SendReport:
    pending = sender.send_async()
    for receiver in receivers:
        receiver.receive(5)
    return pending.wait()


def equal(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("layer", [Select(trainable=True), Select("1.*")])
@pytest.mark.parametrize("others", [[], ["bf16"]], ids=["alone", "bf16"])
def test_a_selection_follows_a_whole_version(layer: Select, others: list[str]) -> None:
    source, target = net(1.0), net(0.0)
    with Sender(Loopback(), source, num_workers=1, layers=[layer, *others]) as sender:
        receiver = Receiver(sender.address(0), target)
        whole = push(sender, receiver)
        fill(source[1], 2.0)
        selected = push(sender, receiver)
    assert equal(source, target)
    assert selected.nbytes < whole.nbytes


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist"])
def test_who_lacks_something_gets_all_of_it(scheme: str) -> None:
    source, early, late = net(1.0), net(0.0), net(0.0)
    with Sender(scheme, source, num_workers=1, layers=[Select("1.*")]) as sender:
        receivers = [Receiver(sender.address(0), early)]
        push(sender, *receivers)
        selected = push(sender, *receivers).workers[0].nbytes
        new = sender.add_worker()
        receivers.append(Receiver(sender.address(new), late))
        # The newest version is a selection, which a new worker cannot use.
        assert receivers[1].receive(0.2) is None
        assert push(sender, *receivers).workers[0].nbytes > selected + 200
        assert equal(source, early)
        assert equal(source, late)
        # Nobody receives this one.
        with pytest.raises(SendError):
            sender.send(timeout=0.1)
        fill(source[1], 3.0)
        push(sender, *receivers)
        assert equal(source, late)
        for receiver in receivers:
            receiver.close()


def test_a_change_of_what_is_left_out_is_sent() -> None:
    source, target = net(1.0), net(0.0)
    with Sender(Loopback(), source, num_workers=1, layers=[Select(trainable=True)]) as sender:
        receiver = Receiver(sender.address(0), target)
        push(sender, receiver)
        fill(source[0], 5.0)
        push(sender, receiver)
    assert equal(source, target)


def test_two_senders_share_no_past() -> None:
    layer = Select("1.*")
    for _ in range(2):
        source, target = net(1.0), net(0.0)
        with Sender(Loopback(), source, num_workers=1, layers=[layer]) as sender:
            push(sender, Receiver(sender.address(0), target))
        assert equal(source, target)


def test_what_chooses_nothing_is_an_error() -> None:
    with pytest.raises(ModelError, match="chooses none of 4 tensors"):
        Sender(Loopback(), net(1.0), num_workers=1, layers=[Select("lora")])
    for arguments in ({}, {"trainable": False}):
        with pytest.raises(ValueError, match="trainable=True"):
            Select(**arguments)
    with pytest.raises(ValueError, match="trainable=True"):
        Select("*", trainable=True)
