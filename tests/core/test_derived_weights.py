"""Tensors derived from a worker's weights follow each commit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from sync_core import Receiver, Sender
from sync_core.models import consolidate

pytestmark = pytest.mark.timeout(60)

#: Small tensors are copied by one call of torch, large ones by numpy.
SIZES = [4, 192]


class Versioned(nn.Module):
    """Keeps what it computed until the counter of a parameter changes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))
        self.key: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = [parameter._version for parameter in self.parameters()]
        if key != self.key:
            self.key, self.kept = key, 2 * self.weight.detach()
        return x @ self.kept


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@contextmanager
def plain() -> Iterator[None]:
    yield


def linear(size: int) -> nn.Module:
    return nn.Linear(size, size)


def orthogonal(size: int) -> nn.Module:
    module: nn.Module = parametrizations.orthogonal(nn.Linear(size, size), use_trivialization=False)
    return module


def weight_norm(size: int) -> nn.Module:
    module: nn.Module = parametrizations.weight_norm(nn.Linear(size, size))
    return module


def spectral_norm(size: int) -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(size, size)).eval()


def sequence(size: int) -> nn.Module:
    return nn.Sequential(nn.LSTM(size, size, batch_first=True), First(), nn.Linear(size, size))


class First(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return pair[0]


Region = Callable[[], AbstractContextManager[None]]
CASES: list[tuple[Callable[[int], nn.Module], Region]] = [
    (linear, autocast),
    (sequence, autocast),
    (weight_norm, autocast),
    (orthogonal, parametrize.cached),
    (weight_norm, parametrize.cached),
    (spectral_norm, parametrize.cached),
    (Versioned, plain),
]


def write_randomly(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("given", ["received", "zero_copy", "consolidated", "by hand", "load"])
@pytest.mark.parametrize(
    ("make", "region"), CASES, ids=[f"{make.__name__}, {by.__name__}" for make, by in CASES]
)
def test_the_next_output_is_that_of_the_committed_version(
    make: Callable[[int], nn.Module], region: Region, given: str, size: int
) -> None:
    source, worker, x = make(size), make(size), torch.ones(1, size)
    with torch.no_grad(), region():
        try:
            worker(x)
        except RuntimeError as error:  # oneDNN's LSTM of bfloat16 without AVX-512
            pytest.skip(f"torch cannot run the model on this processor: {error}")
    copies: list[nn.Module] = []
    load = None
    if given == "consolidated":
        consolidate(worker)
    elif given == "load":

        def load(named: Any) -> None:
            nn.Module.load_state_dict(worker, dict(named), strict=False)

    with (
        Sender("thread", source, num_workers=1, zero_copy=given == "zero_copy") as sender,
        Receiver(sender.address(0), worker, load=load) as receiver,
        torch.no_grad(),
        region(),
    ):
        for _ in range(3):
            worker(x)
            write_randomly(source)
            if given == "by hand":
                receiver.apply_weights(source)
            else:
                pending = sender.send_async()
                receiver.receive(5)
                pending.wait()
            # Nothing is known yet of a copy's tensors.
            copies.append(copy.deepcopy(source))
            assert torch.equal(worker(x), copies[-1](x))


def test_a_torch_without_that_cache_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(parametrize, "_cache")
    source, worker = linear(4), linear(4)
    with Sender("thread", source, num_workers=1) as sender:
        Receiver(sender.address(0), worker).apply_weights(source)
    assert torch.equal(worker(torch.ones(4)), source(torch.ones(4)))
