"""Workers get the weights to act with, and training goes on as without the sends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import OptionError, Receiver, Sender
from sync_plugin_std import optimizer_weights


class ScheduleFree(torch.optim.SGD):
    """Interpolates in place, which rounds, and notes which weights the model has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.group = self.param_groups[0]
        self.group["train_mode"] = True
        self.z = [p.detach().clone() for p in self.group["params"]]

    def _go(self, weight: float, *, train: bool) -> None:
        if self.group["train_mode"] is not train:
            self.group["train_mode"] = train
            for p, z in zip(self.group["params"], self.z, strict=True):
                p.data.lerp_(z, weight)

    def eval(self) -> None:
        self._go(1 - 1 / 0.9, train=False)

    def train(self) -> None:
        self._go(1 - 0.9, train=True)

    def step(self, closure: Any = None) -> Any:
        assert self.group["train_mode"]
        return super().step(closure)

    def acting(self) -> list[Tensor]:
        weight = 1 - 1 / 0.9
        return [p.lerp(z, weight) for p, z in zip(self.group["params"], self.z, strict=True)]


class Lookahead(torch.optim.SGD):
    """Keeps slow weights beside those of the model."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.ps = self.param_groups[0]["params"]
        self.slow = [p.detach().clone() for p in self.ps]

    def backup_and_load_cache(self) -> None:
        self.kept = [p.detach().clone() for p in self.ps]
        for p, slow in zip(self.ps, self.slow, strict=True):
            p.data.copy_(slow)

    def clear_and_load_backup(self) -> None:
        for p, kept in zip(self.ps, self.kept, strict=True):
            p.data.copy_(kept)

    def acting(self) -> list[Tensor]:
        return self.slow


class Averaged(Lookahead):
    """Offers a context manager, as averages do."""

    backup_and_load_cache = clear_and_load_backup = None  # type: ignore[assignment]

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        Lookahead.backup_and_load_cache(self)
        yield
        Lookahead.clear_and_load_backup(self)


class LikeSAM(torch.optim.SGD):
    """Is left between its two steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.ps = self.param_groups[0]["params"]

    def step(self, closure: Any = None) -> Any:
        for p in self.ps:
            if "old_p" in self.state[p]:
                p.data = self.state[p]["old_p"]
        loss = super().step(closure)
        for p in self.ps:
            self.state[p]["old_p"] = p.data.clone()
            p.data.add_(0.05)
        return loss

    def acting(self) -> list[Tensor]:
        return [self.state[p].get("old_p", p) for p in self.ps]


def train(
    make: Callable[[Any], Any], scheme: str | None
) -> tuple[list[Tensor], list[list[Tensor]], list[list[Tensor]]]:
    """Return the weights after training, and at each send those expected and those received."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = make(model.parameters())
    received, expected = [], []
    worker = copy.deepcopy(model)
    barrier = optimizer_weights(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    if scheme is None:
        for _ in range(4):
            step()
        return [p.detach().clone() for p in model.parameters()], [], []
    with Sender(scheme, model, num_workers=1, before_read=barrier) as sender:
        receiver = Receiver(sender.address(0), worker)
        for _ in range(4):
            step()
            expected.append([t.detach().clone() for t in optimizer.acting()])
            pending = sender.send_async()
            receiver.receive(10.0)
            pending.wait()
            received.append([p.detach().clone() for p in worker.parameters()])
        receiver.close()
    return [p.detach().clone() for p in model.parameters()], expected, received


@pytest.mark.parametrize("make", [ScheduleFree, Lookahead, Averaged, LikeSAM])
@pytest.mark.parametrize("scheme", ["thread", "dist"])
def test_workers_act_with_the_right_weights_and_training_is_the_same(
    make: Callable[[Any], Any], scheme: str
) -> None:
    trained, expected, received = train(make, scheme)
    for want, got in zip(expected, received, strict=True):
        assert all(map(torch.equal, want, got))
    alone, _, _ = train(make, None)
    assert all(map(torch.equal, trained, alone))


def test_weights_that_are_to_act_with_already_are_left_alone() -> None:
    model = nn.Linear(3, 3)
    optimizer = ScheduleFree(model.parameters())
    optimizer.eval()
    with optimizer_weights(optimizer)():
        pass
    assert not optimizer.group["train_mode"]


def test_an_optimizer_without_other_weights_is_refused() -> None:
    with pytest.raises(OptionError, match=r"a Adam has none: leave before_read= out"):
        optimizer_weights(torch.optim.Adam(nn.Linear(2, 2).parameters()))
