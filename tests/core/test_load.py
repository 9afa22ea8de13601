"""Receivers with their own way of loading: Receiver(load=…)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

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


def loading_into(module: nn.Module) -> Callable[[Any], object]:
    return lambda named: module.load_state_dict(dict(named), strict=False)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


def rotary() -> nn.Module:
    module = model(1.0)
    module.register_buffer("inv_freq", torch.ones(2), persistent=False)
    return module


def returning(value: Any) -> Callable[[Any], object]:
    return lambda named: (list(named), value)[1]


@pytest.mark.parametrize(
    ("load", "left"),
    [
        (returning({"weight"}), "took 1 of 2 tensors, and not 'bias';"),
        (returning(frozenset({"bias"})), "took 1 of 2 tensors, and not 'weight';"),
        (returning(["weight"]), "took 1 of 2 tensors, and not 'bias';"),
        (returning(dict.fromkeys(["weight"]).keys()), "took 1 of 2 tensors, and not 'bias';"),
        (returning(set()), "took 0 of 2 tensors, and not 'weight', 'bias';"),
        (loading_into(nn.Linear(3, 2, bias=False)), "took 1 of 2 tensors, and not 'bias';"),
    ],
)
def test_a_load_that_returns_what_it_left_out_is_refused_by_name(
    load: Callable[[Any], object], left: str
) -> None:
    with Sender(Loopback(), model(1.0), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), load=load)
        with pytest.raises(SendError) as caught:
            push(sender, receiver)
        status = sender.workers[0]
        assert (status.state, receiver.version) == (WorkerState.BAD, 0)
        assert isinstance(status.error, LoadError)
    assert left in str(caught.value)
    assert "rename(" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "load"),
    [
        *(
            (model(1.0), returning(value))
            for value in (None, 2, True, "weight", {"weight": 1}, [], (), ["weight", 3])
        ),
        (model(1.0), returning({"weight", "bias"})),
        (model(1.0), list),
        # The engine's own names, of which some are those that were sent.
        (model(1.0), returning({"engine.weight", "bias"})),
        (model(1.0), loading_into(model(0.0))),
        # It has a tensor that is not sent.
        (nn.Linear(3, 2, bias=False), loading_into(model(0.0))),
        (tied(), returning({"0.weight", "0.bias", "1.bias"})),
        (tied(), returning({"1.weight", "0.bias", "1.bias"})),
        (rotary(), loading_into(model(0.0))),
    ],
)
def test_a_load_that_took_all_or_does_not_say_is_current(
    source: nn.Module, load: Callable[[Any], object]
) -> None:
    with Sender(Loopback(), source, num_workers=1) as sender:
        push(sender, Receiver(sender.address(0), load=load))
        assert sender.workers[0].state is WorkerState.CURRENT


def test_buffers_that_the_model_given_does_not_save_may_be_left_out() -> None:
    source = model(1.0)
    source.register_buffer("mask", torch.ones(2), persistent=False)
    with Sender(Loopback(), source, num_workers=1) as sender:
        push(sender, Receiver(sender.address(0), source, load=returning({"weight", "bias"})))
        assert sender.workers[0].state is WorkerState.CURRENT
