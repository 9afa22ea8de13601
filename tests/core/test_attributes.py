"""A change in the trainer's modules that no update sends is reported once."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sync_core import Receiver, Sender
from sync_core.models import UnsentAttributes


class Statistics:
    def __init__(self) -> None:
        self.mean = np.zeros(3)
        self.self = self  # an object may refer to itself


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.flag, self.count, self.rate, self.mode = False, 3, 0.1, "train"
        self.scalar, self.array = np.float32(0.5), np.zeros((20, 20))
        self.tensor, self.narrow = torch.zeros(3), torch.zeros(2).to(torch.float8_e4m3fn)
        self.statistics = Statistics()
        self.table: dict[str, Any] = {"a": [1, {"b": 2.0}]}
        self.never, self.conjugate = float("nan"), torch.zeros(2, dtype=torch.complex64).conj()
        self.library = SimpleNamespace(changes=0)
        self.function = len


CHANGES: list[tuple[str, Callable[[Policy], Any], str]] = [
    ("flag", lambda p: setattr(p, "flag", True), "False to True"),
    ("count", lambda p: setattr(p, "count", 4), "3 to 4"),
    ("rate", lambda p: setattr(p, "rate", 0.2), "0.1 to 0.2"),
    ("mode", lambda p: setattr(p, "mode", "act"), "'train' to 'act'"),
    ("scalar", lambda p: setattr(p, "scalar", np.float32(2.0)), "0.5 to 2.0"),
    ("array", lambda p: p.array.fill(1), r"an array of \(20, 20\) to an array of \(20, 20\)"),
    ("tensor", lambda p: p.tensor.data.add_(1), r"an array of \(3,\)"),
    ("tensor", lambda p: setattr(p, "tensor", torch.zeros(1)), r"an array of \(3,\) to 0\.0"),
    ("statistics.mean", lambda p: p.statistics.mean.fill(1), "an array of"),
    ("table['a'][1]['b']", lambda p: p.table["a"][1].update(b=3.0), "2.0 to 3.0"),
]


@pytest.mark.parametrize(("path", "change", "told"), CHANGES)
@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {"policy": p}])
def test_a_sender_warns_once_of_what_it_does_not_send(
    path: str, change: Any, told: str, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, worker = Policy(), Policy()
    with Sender("thread", wrap(trainer), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), wrap(worker))
        for version in range(1, 9):
            if version > 1:
                change(trainer)
            pending = sender.send_async()
            assert receiver.receive(10.0) == version
            pending.wait()
        receiver.close()
    (warning,) = [r.message for r in caplog.records if " changed from " in r.message]
    assert warning.startswith(f"policy.{path} changed from ")
    (change_of,) = [c for c in _changes(change) if c.path == f"policy.{path}"]
    assert re.search(told, change_of.advice)


def _changes(change: Callable[[Policy], Any]) -> list[Any]:
    policy = Policy()
    attributes = UnsentAttributes({"policy": policy})
    assert attributes.changes() == []
    change(policy)
    return attributes.changes()


def test_what_travels_or_is_the_trainers_own_is_not_reported() -> None:
    class Travels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def get_extra_state(self) -> int:
            return self.steps

        def set_extra_state(self, state: int) -> None:
            self.steps = state

    policy, travels = Policy(), Travels()
    policy.travels = travels
    attributes = UnsentAttributes({"policy": policy})
    policy.eval()
    policy.net.weight.data.add_(1)
    policy.library.changes += 1
    travels.steps += 1
    assert attributes.changes() == []
