"""Models of several tests of the core, and their weights as a receiver has them."""

from __future__ import annotations

import torch
from torch import nn

from sync_core import Payload, Update
from sync_core.models import Binding


def filled(module: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(value)
    return module


def received(source: nn.Module) -> Update:
    """The weights of a module as they come out of a payload."""
    update = Binding(source).read()
    payload = Payload.from_bytes(Payload(1, update.layout, update.tensors).to_bytes(), 1)
    return Update(payload.layout, payload.source)


class Counter(nn.Module):
    """A module with extra state that can refuse to be set."""

    def __init__(self, count: int, *, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(count)))
        self.count = torch.tensor(count)
        self.fails = fails

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        if self.fails and int(state["count"]) == 5:
            raise RuntimeError("five is not allowed")
        self.count = state["count"]
