"""Ctrl-C at any moment of `receive`: what the model has, and what comes after that."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.core.models import filled
from torch import nn

from sync_core import ApplyError, Receiver, Sender, SendError
from sync_plugin_std.local import MappedSlots
from sync_testing import interrupted
from sync_testing.fuzz import find


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def values(module: nn.Module) -> set[float]:
    ends = (torch.aminmax(tensor) for tensor in module.state_dict().values())
    return {value.item() for both in ends for value in both}


def receive_with_ctrl_c(at: int, scheme: str, options: dict[str, Any]) -> bool:
    """Interrupt the second `receive` of a worker; return whether there was such a moment."""
    source, target = model(), model()
    with Sender(scheme, source, num_workers=1, timeout=60, **options) as sender:
        receiver = Receiver(sender.address(0), target)
        filled(source, 1.0)
        pending = sender.send_async()
        receiver.receive(60)
        pending.wait()
        filled(source, 2.0)
        pending = sender.send_async()
        with interrupted(at) as moments:
            receiver.receive(60)
        assert values(target) == {float(receiver.version)}, f"after Ctrl-C at {at}"
        # The staged version is rejected before the next one.
        receiver.receive(0)
        with suppress(SendError):
            pending.wait(0)
        assert values(target) == {float(receiver.version)}, f"later, after Ctrl-C at {at}"
        error = pending.deliveries[0].error
        if isinstance(error, ApplyError):
            assert (error.model_state == "new") is (receiver.version == 2)
        filled(source, 3.0)
        pending = sender.send_async()
        assert receiver.receive(60) == 3, f"after Ctrl-C at {at}"
        assert pending.wait().updated == (0,)
        receiver.close()
    return moments.came


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_copy": True},
        pytest.param({"strategy": "state_dict"}, marks=pytest.mark.long),
        {"layers": ["fp16"]},
    ],
    ids=str,
)
def test_a_receiver_knows_which_version_it_has(options: dict[str, Any]) -> None:
    moment = 0
    while receive_with_ctrl_c(moment, "thread", options):
        moment += 1
    assert moment > 50


@pytest.mark.long
def test_a_receiver_in_shared_memory_gets_the_next_version() -> None:
    moment = 0
    while receive_with_ctrl_c(moment, "shm", {}):
        moment += 1
    assert moment > 50


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{"shared_memory": False}, {"topology": "broadcast"}], ids=str)
def test_a_receiver_over_process_groups_gets_the_next_version(options: dict[str, Any]) -> None:
    moment = 0
    while receive_with_ctrl_c(moment, "dist", options):
        moment += 1
    assert moment > 150


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_memory_is_given_back(scheme: str) -> None:
    with Sender(scheme, model(), num_workers=1, timeout=30) as sender:
        receiver = Receiver(sender.address(0), model())
        moment, came = 0, True
        while came:
            # It finds memory that no interrupted worker reads.
            pending = sender.send_async()
            with interrupted(moment) as moments:
                receiver.receive(30)
            receiver.receive(0)
            with suppress(SendError):
                pending.wait(0)
            assert not any(slots.held for slots in find(receiver, MappedSlots))
            moment, came = moment + 1, moments.came
        assert receiver.version == pending.version
        receiver.close()


def add_with_ctrl_c(at: int) -> bool:
    """Interrupt the addition of a worker; return whether there was such a moment."""
    with Sender("thread", model(), num_workers=1, timeout=60) as sender:
        receiver = Receiver(sender.address(0), model())
        with interrupted(at) as moments:
            sender.add_worker(1)
        if 1 in sender.all_worker_ids():
            sender.remove_worker(1)
        pending = sender.send_async()
        receiver.receive(60)
        assert pending.wait().updated == (0,)
        assert sender.add_worker(1) == 1
        assert sender.address(1).worker_id == 1
        receiver.close()
    return moments.came


def test_a_worker_is_added_or_not() -> None:
    moment = 0
    while add_with_ctrl_c(moment):
        moment += 1
    assert moment > 5
