"""The time that a trainer needs is not charged to its workers."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import Receiver, Sender, hookimpl
from sync_core.errors import PrepareTimeoutError
from sync_plugin_std import SendGroup


class Slow:
    """A layer that sleeps for some seconds."""

    seconds = 0.0

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Any, Any]:
        update = yield
        threading.Event().wait(self.seconds)
        return update


class SlowHook(nn.Linear):
    """A module whose hook of `state_dict` sleeps for some seconds."""

    seconds = 0.0

    def get_extra_state(self) -> torch.Tensor:
        threading.Event().wait(self.seconds)
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None: ...


@pytest.mark.parametrize("policy", ["raise", "drop", "quarantine"])
@pytest.mark.parametrize("slow", ["layer", "model"])
def test_weights_that_are_late_are_no_workers_fault(slow: str, policy: Any) -> None:
    layer, model, copy = Slow(), SlowHook(2, 2), SlowHook(2, 2)
    with (
        Sender(
            "thread", model, num_workers=1, timeout=0.4, on_failure=policy, layers=["bf16", layer]
        ) as sender,
        ThreadPoolExecutor(1) as threads,
    ):
        receiver = Receiver(sender.address(0), copy)
        (layer if slow == "layer" else model).seconds = 0.6
        named = "layer 'Slow' took" if slow == "layer" else "reading the model took"
        with pytest.raises(PrepareTimeoutError, match=named):
            sender.send()
        assert sender.workers[0].failures == 0
        # In time, and the worker has its own time after that.
        layer.seconds, model.seconds = 0.3, 0.0
        pending = sender.send_async()
        threading.Event().wait(0.25)
        received = threads.submit(receiver.receive, 10.0)
        assert pending.wait().updated == (0,)
        assert received.result() == pending.version


def test_one_of_several_models_that_is_late_is_no_workers_fault() -> None:
    models = {name: nn.Linear(2, 2) for name in "ab"}
    late = Slow()
    senders = {
        name: Sender(
            "thread", model, num_workers=1, on_failure="drop", layers=[late] * (name > "a")
        )
        for name, model in models.items()
    }
    group = SendGroup(senders)
    late.seconds = 0.3
    with pytest.raises(PrepareTimeoutError):
        group.send(timeout=0.2)
    assert [sender.all_worker_ids() for sender in senders.values()] == [(0,), (0,)]
    group.close()
