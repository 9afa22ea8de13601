"""A model is read when it holds the policy: barriers, forward pre-hooks, and pauses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from sync_core import ModelError, PausedError, Receiver, Sender, gathered
from sync_plugin_std import SendGroup


def received(sender: Sender, model: nn.Linear) -> Tensor:
    """Send, and return the weight that a worker has got."""
    pending = sender.send_async()
    with Receiver(sender.address(0), model) as receiver:
        assert receiver.receive(10.0) == pending.version
    pending.abandon()
    return model.weight.detach().clone()


class Deferred:
    """Completes a model before its next forward, as an optimizer of several ranks does."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0
        model.register_forward_pre_hook(self.complete)

    def complete(self, *_: Any) -> None:
        self.calls += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(self.calls)


@pytest.mark.parametrize("wrap", [lambda model: model, gathered, lambda model: {"actor": model}])
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict", "checkpoint"])
def test_a_hook_that_may_write_parameters_is_refused_by_name(wrap: Any, strategy: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    deferred = Deferred(model[0])
    with pytest.raises(ModelError, match=r"0 \(a Linear\) has a forward pre-hook, .*Deferred\.com"):
        Sender("thread", wrap(model), num_workers=1, strategy=strategy)
    if wrap is not gathered:
        Sender(
            "thread", wrap(model), num_workers=1, strategy=strategy, before_read=deferred.complete
        ).close()
    Sender("none", model, num_workers=1).close()


def test_hooks_of_torch_are_not_refused() -> None:
    model = torch.nn.utils.spectral_norm(nn.Linear(2, 2))
    prune.l1_unstructured(model, "bias", amount=1)
    with Sender("thread", model, num_workers=1):
        pass


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist", "chunked::thread"])
def test_a_function_completes_the_model_before_it_is_read(scheme: str) -> None:
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    deferred = Deferred(model)
    with Sender(scheme, model, num_workers=1, before_read=deferred.complete) as sender:
        # The first reading was for the layout.
        for calls in (2, 3):
            assert received(sender, copy).eq(calls).all()
        assert sender.snapshot()["weight"].eq(4).all()
        sender.check()
        group = SendGroup({"a": sender})
        group.send_async().abandon()
        assert deferred.calls == 6


@pytest.mark.parametrize("reusable", [True, False])
def test_a_context_manager_is_left_when_the_version_was_packed(*, reusable: bool) -> None:
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)

    class Other:
        depth = 0

        def __enter__(self) -> None:
            self.depth += 1
            model.weight.data.add_(100)

        def __exit__(self, *_: object) -> None:
            self.depth -= 1
            model.weight.data.sub_(100)

    @contextmanager
    def entered() -> Iterator[None]:
        with other:
            yield

    other = Other()
    model.weight.data.zero_()
    with Sender("shm", model, num_workers=1, before_read=other if reusable else entered) as sender:
        assert received(sender, copy).eq(100).all()
        assert model.weight.eq(0).all()
        with pytest.raises(ModelError):
            sender.send({"weight": object()})
        assert other.depth == 0


def test_what_is_no_barrier_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"before_read is 7, which cannot be called; give a function"
    ):
        Sender("thread", nn.Linear(2, 2), num_workers=1, before_read=7)


def test_what_a_barrier_raises_sends_nothing() -> None:
    model = nn.Linear(2, 2)
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not now")

    with Sender("thread", model, num_workers=1, before_read=fails) as sender:
        with pytest.raises(RuntimeError, match="not now"):
            sender.send()
        assert sender.version == 0
        assert sender.send(worker_ids=[]).version == 0


def test_no_version_is_sent_while_a_sender_is_paused() -> None:
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    with Sender("thread", model, num_workers=1) as sender:
        with sender.paused("outer"):
            with (
                pytest.raises(PausedError, match="no version is sent now: inner"),
                sender.paused("inner"),
            ):
                sender.send_async()
            with pytest.raises(PausedError, match="outer"):
                SendGroup({"a": sender}).send()
        assert sender.version == 0
        assert torch.equal(received(sender, copy), model.weight)
