"""A receiver that is given another model has no version, and the newest one comes again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.core.models import filled
from torch import nn

from sync_core import (
    ClosedError,
    LayoutMismatchError,
    Receiver,
    Sender,
    SenderLostError,
    WorkerState,
)
from sync_plugin_scale import Sharded, join_addresses
from sync_testing.worker_groups import eventually

SCHEMES = ["thread", "shm", "mp", "increments::mp", "chunked::shm"]


def linear(value: float) -> nn.Module:
    return filled(nn.Linear(3, 2), value)


def value_of(model: nn.Module) -> float:
    return float(next(model.parameters()).detach()[0, 0])


def deliver(sender: Sender, receiver: Receiver) -> None:
    pending = sender.send_async(extras={"step": torch.ones(1)})
    assert receiver.receive() == pending.version
    assert receiver.extras
    pending.wait()


def is_current(sender: Sender) -> bool:
    return sender.workers[0].state is WorkerState.CURRENT


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("background", [False, True])
def test_the_newest_version_comes_again(scheme: str, background: bool) -> None:
    source = linear(1.0)
    with Sender(scheme, source, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), linear(0.0), background=background)
        deliver(sender, receiver)
        for value in (2.0, 3.0):
            receiver.register_model(later := linear(0.0))
            assert (receiver.version, receiver.delivered, receiver.extras) == (0, 0, {})
            assert eventually(lambda: not is_current(sender))
            assert receiver.receive() == value - 1
            receiver.register_model(later)
            assert receiver.receive(0) is None
            assert eventually(lambda: is_current(sender))
            filled(source, value)
            deliver(sender, receiver)
            assert value_of(later) == value
        receiver.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_send_that_is_under_way_reaches_the_other_model(scheme: str) -> None:
    with Sender(scheme, linear(1.0), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), linear(0.0))
        pending = sender.send_async()
        assert receiver.stage() == 1
        receiver.register_model(later := linear(0.0))
        assert not pending.unanswered[0].ended
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)
        assert value_of(later) == 1.0
        receiver.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_comes_in_on_commit_is_not_current(scheme: str) -> None:
    later = linear(0.0)
    with Sender(scheme, linear(1.0), num_workers=1) as sender:
        receiver = Receiver(
            sender.address(0), linear(0.0), on_commit=lambda _: receiver.register_model(later)
        )
        pending = sender.send_async()
        receiver.receive()
        assert (receiver.version, pending.unanswered[0].ended) == (0, False)
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)
        assert value_of(later) == 1.0
        receiver.close()


def test_a_reference_that_leads_to_another_module_gets_the_newest_version() -> None:
    worker = SimpleNamespace(policy=linear(0.0))
    with Sender("shm", linear(1.0), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), "policy", context=worker)
        deliver(sender, receiver)
        assert receiver.receive(0) is None
        worker.policy = linear(0.0)
        assert receiver.receive() == 1
        assert value_of(worker.policy) == 1.0
        receiver.close()


def test_shards_are_planned_for_the_other_model() -> None:
    source = linear(1.0)
    with Sender(Sharded("shm", 0, 1), source, num_workers=1) as sender:
        address = join_addresses([sender.address(0)])
        receiver = Receiver(address, linear(0.0))
        deliver(sender, receiver)
        receiver.register_model(later := linear(0.0))
        assert receiver.receive() == 1
        assert value_of(later) == 1.0
        receiver.close()


def test_a_model_that_cannot_be_taken_changes_nothing() -> None:
    source, first = linear(1.0), linear(0.0)
    with Sender("shm", source, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), first)
        deliver(sender, receiver)
        with pytest.raises(LayoutMismatchError):
            receiver.register_model(nn.Linear(5, 2))
        assert receiver.version == 1
        filled(source, 2.0)
        deliver(sender, receiver)
        assert value_of(first) == 2.0
    with pytest.raises(SenderLostError):
        receiver.register_model(linear(0.0))
    receiver.close()
    with pytest.raises(ClosedError):
        receiver.register_model(linear(0.0))
