"""Receivers with their own way of loading: Receiver(load=…)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from sync_core import Receiver, Sender, SendError, WorkerState
from sync_core.errors import LoadError
from sync_plugin_std import select
from sync_testing import Loopback


class Engine:
    """An inference engine whose loader renames tensors, and may fail in the middle."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.fails = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if self.fails and name.endswith("bias"):
                raise RuntimeError("no such kernel")
            self.held[f"engine.{name}"] = tensor.clone()


def model(value: float) -> nn.Linear:
    linear = nn.Linear(3, 2)
    for parameter in linear.parameters():
        nn.init.constant_(parameter, value)
    return linear


def push(sender: Sender, receiver: Receiver) -> None:
    pending = sender.send_async()
    with suppress(LoadError):
        receiver.receive(0)
    pending.wait(0)


def test_an_engine_gets_what_was_sent() -> None:
    engine = Engine()
    with Sender(Loopback(), model(2.0), num_workers=1, layers=["bf16", "checksum"]) as sender:
        receiver = Receiver(sender.address(0), load=engine.load_weights)
        push(sender, receiver)
    assert set(engine.held) == {"engine.weight", "engine.bias"}
    assert all(torch.equal(t, torch.full_like(t, 2.0)) for t in engine.held.values())
    assert engine.held["engine.weight"].dtype == torch.bfloat16
    # Vectors travel as they are.
    assert engine.held["engine.bias"].dtype == torch.float32


def test_an_engine_that_loaded_a_part_is_bad_until_it_has_a_whole_version() -> None:
    engine, source = Engine(), model(1.0)
    with Sender(Loopback(), source, num_workers=1, layers=[select("*")]) as sender:
        receiver = Receiver(sender.address(0), load=engine.load_weights)
        push(sender, receiver)
        engine.fails = True
        with torch.no_grad():
            source.weight.fill_(2.0)
        with pytest.raises(SendError, match=r"(?s)known bad.*parts of version 2.*no such kernel"):
            push(sender, receiver)
        status = sender.workers[0]
        assert (status.state, status.version, receiver.version) == (WorkerState.BAD, 0, 0)
        assert isinstance(status.error, LoadError)
        engine.fails = False
        engine.held.clear()
        pending = sender.send_async({"weight": torch.full((2, 3), 3.0)})
        assert receiver.receive(0) == 3
        assert pending.wait(0).updated == (0,)
        assert sender.workers[0].state is WorkerState.CURRENT
    # The send of one tensor brought all of them.
    assert set(engine.held) == {"engine.weight", "engine.bias"}


def test_with_zero_copy_too_tensors_are_good_during_the_call() -> None:
    engine, source = Engine(), model(1.0)
    with Sender("thread", source, num_workers=1, zero_copy=True) as sender:
        receiver = Receiver(sender.address(0), load=engine.load_weights)
        for version in (1, 2, 3):
            nn.init.constant_(source.weight, version)
            pending = sender.send_async()
            assert receiver.receive(5) == version
            assert pending.wait().updated == (0,)
            assert torch.equal(engine.held["engine.weight"], source.weight)
        receiver.close()


def test_an_interrupt_while_loading_leaves_the_worker_bad() -> None:
    def interrupted(weights: Iterable[tuple[str, Tensor]]) -> None:
        del weights
        raise KeyboardInterrupt

    with Sender(Loopback(), model(1.0), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), load=interrupted)
        pending = sender.send_async()
        with pytest.raises(KeyboardInterrupt):
            receiver.receive(0)
        with pytest.raises(SendError):
            pending.wait(0)
        assert sender.workers[0].state is WorkerState.BAD
