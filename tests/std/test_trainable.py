"""The layer `select` with frozen parameters: they travel once, and never silently differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sync_core import Receiver, Sender, SendReport, WorkerState
from sync_core.models import consolidate
from sync_plugin_scale import Increments
from sync_testing import Loopback


class Far(Loopback):
    capabilities = Loopback.capabilities | {"cross_process"}


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))


def frozen_model() -> nn.Sequential:
    model = make()
    model[0].requires_grad_(False)
    return model


def send(sender: Sender, *receivers: Receiver, given: Any = None) -> SendReport:
    pending = sender.send_async(given)
    for receiver in receivers:
        receiver.receive(0)
    return pending.wait(10.0)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def nbytes_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
        next(model.buffers()).add_(1)


@pytest.mark.parametrize("increments", [False, True])
def test_only_the_first_version_has_frozen_parameters(increments: bool) -> None:
    model, copy, late = frozen_model(), make(), make()
    scheme = Increments(Far()) if increments else Far()
    with Sender(scheme, model, num_workers=1, layers=["select"], timeout=10) as sender:
        receiver = Receiver(sender.address(0), copy)
        first = send(sender, receiver).nbytes
        for _ in range(2):
            train(model)
            report = send(sender, receiver)
            assert report.nbytes < first / 2
            assert equal(model, copy)
        worker_id = sender.add_worker()
        joined = Receiver(sender.address(worker_id), late)
        joined.receive(0)
        train(model)
        send(sender, receiver, joined)
        assert equal(model, copy)
        assert equal(model, late)
        assert all(w.state is WorkerState.CURRENT for w in sender.workers.values())


def test_a_frozen_parameter_that_changes_travels_again() -> None:
    model, copy = frozen_model(), make()
    with Sender(Far(), model, num_workers=1, layers=["select"], timeout=10) as sender:
        receiver = Receiver(sender.address(0), copy)
        send(sender, receiver)
        train(model)
        trained = send(sender, receiver).nbytes
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        assert send(sender, receiver).nbytes > trained
        assert equal(model, copy)
        train(model)
        assert send(sender, receiver).nbytes == trained
        assert send(sender, receiver, given=model.state_dict()).updated == (0,)
        assert equal(model, copy)


def swap(tensor: torch.Tensor, one: int, other: int) -> None:
    tensor[[one, other]] = tensor[[other, one]]


def negate(tensor: torch.Tensor, one: int, other: int) -> None:
    tensor[[one, other]] *= -1


def add(tensor: torch.Tensor, one: int, other: int) -> None:
    tensor[one] += 1
    del other


def add_and_subtract(tensor: torch.Tensor, one: int, other: int) -> None:
    tensor[one] += 1
    tensor[other] -= 1


def invert(tensor: torch.Tensor, one: int, other: int) -> None:
    bits = tensor.view(torch.uint8).view(len(tensor), -1)
    bits[[one, other]] ^= 255


def large_model() -> nn.ModuleList:
    """Frozen parameters of several dtypes; each is reduced in rows, and has a rest."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(300, 1001), nn.Linear(300, 1001).double()])
    model.extend([nn.Linear(301, 1001).bfloat16(), nn.Linear(2, 2)])
    for layer in list(model)[1:]:
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize("change", [swap, negate, add, add_and_subtract, invert])
def test_each_write_through_data_is_noticed_at_the_next_send(change: Any) -> None:
    model, copy = large_model(), large_model()
    generator = torch.Generator().manual_seed(1)
    with Sender(Far(), model, num_workers=1, layers=["select"], timeout=10) as sender:
        receiver = Receiver(sender.address(0), copy)
        send(sender, receiver)
        least = send(sender, receiver).nbytes
        for parameter in list(model.parameters())[2:] * 4:
            flat = parameter.data.view(-1)
            if len(flat) > 1:
                places = torch.randint(len(flat) // 2, (2,), generator=generator)
                # Not counted by torch.
                change(flat, int(places[0]), int(places[1]) + len(flat) // 2)
                assert send(sender, receiver).nbytes > least
                assert equal(model, copy)
        assert send(sender, receiver).nbytes == least


def test_a_model_in_one_block_sends_what_is_trained() -> None:
    model, copy = frozen_model(), make()
    consolidate(model)
    with Sender(Far(), model, num_workers=1, layers=["select"], timeout=10) as sender:
        receiver = Receiver(sender.address(0), copy)
        whole = send(sender, receiver).nbytes
        assert send(sender, receiver).nbytes < whole / 2


def test_parameters_that_are_frozen_or_trained_later() -> None:
    model, copy = frozen_model(), make()
    with Sender(Far(), model, num_workers=1, layers=["select"], timeout=10) as sender:
        receiver = Receiver(sender.address(0), copy)
        send(sender, receiver)
        model[0].requires_grad_(True)
        train(model)
        send(sender, receiver)
        assert equal(model, copy)
        train(model)
        model[0].requires_grad_(False)
        send(sender, receiver)
        assert equal(model, copy)
        train(model)
        assert send(sender, receiver).updated == (0,)
        assert equal(model, copy)


def test_a_tied_parameter_is_trained_if_it_is_under_one_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    dict(model.named_parameters())["0.bias"].requires_grad_(False)
    copy = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    copy[1].weight = copy[0].weight
    with Sender(Far(), model, num_workers=1, layers=["select"], timeout=10) as sender:
        receiver = Receiver(sender.address(0), copy)
        send(sender, receiver)
        with torch.no_grad():
            next(model.parameters()).add_(1)
        send(sender, receiver)
        assert equal(model, copy)
