"""Ray actors that host models, for tests of senders that call them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import cloudpickle
from torch import nn

from sync_core import Address, Receiver

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def linear(fill: float = 0.0, width: int = 3) -> nn.Linear:
    model = nn.Linear(width, width)
    for parameter in model.parameters():
        parameter.data.fill_(fill)
    return model


def values_of(model: nn.Module) -> set[float]:
    return {v for p in model.parameters() for v in p.detach().flatten().tolist()}


def pair(fill: float, size: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(fill)) for name in "ab"}


class Env:
    def __init__(self) -> None:
        self.transform = [linear()]


class Agent:
    """Hosts models in every place that a reference may point to, and a receiver of the policy."""

    def __init__(self, width: int = 3) -> None:
        self.reset(width)

    def reset(self, width: int = 3) -> None:
        self.receiver: Receiver | None = None
        self.policy: Any = linear(width=width)
        self.env = Env()
        self.parts: dict[int, tuple[Receiver, torch.Tensor]] = {}
        self.nets = {"critic": linear()}

    def the_model(self) -> Any:
        return self.policy

    def host(self, policy: Any) -> None:
        self.policy = policy

    def hosted(self) -> set[float]:
        return {v for tensor in self.policy.values() for v in tensor.tolist()}

    def pid(self) -> int:
        return os.getpid()

    def wait_for(self, path: Path) -> None:
        """Take no other call until the file exists."""
        while not path.exists():
            time.sleep(0.01)

    def values(self) -> dict[str, set[float]]:
        models = {
            "policy": self.policy,
            "env.transform[0]": self.env.transform[0],
            "nets['critic']": self.nets["critic"],
        }
        return {name: values_of(model) for name, model in models.items()}

    def connect(self, address: Address, width: int = 3) -> int:
        self.reset(width)
        self.receiver = Receiver(address, self.policy)
        return os.getpid()

    def receive(self, timeout: float | None = None) -> tuple[int | None, set[float]]:
        assert self.receiver is not None
        return self.receiver.receive(timeout), values_of(self.policy)

    def attend(self) -> bool:
        """Return whether the receiver can be notified of versions."""
        receiver = self.receiver
        assert receiver is not None
        return receiver.on_arrival(lambda: None)

    def disconnect(self) -> set[float]:
        assert self.receiver is not None
        self.receiver.close()
        return values_of(self.policy)

    def shares_memory(self) -> bool:
        first, second = (p.untyped_storage().data_ptr() for p in self.policy.parameters())
        return bool(first == second)

    def write_in_place(self) -> None:
        with torch.no_grad():
            self.policy.weight.add_(1)


class Other:
    """Another class, with a model of the same name."""

    def __init__(self) -> None:
        self.policy = linear()

    def value(self) -> float:
        return self.policy.weight[0, 0].item()


def start(number: int, **options: Any) -> list[Any]:
    return [ray.remote(Agent).options(num_cpus=0, **options).remote() for _ in range(number)]


def policy_of(actor: Any) -> set[float]:
    values: dict[str, set[float]] = ray.get(actor.values.remote())
    return values["policy"]
