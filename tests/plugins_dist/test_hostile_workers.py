"""A worker of ``dist`` that keeps to no protocol costs its own place, and never another's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from sync_core import Answer, Receiver, Sender
from sync_plugin_std.local import Channel
from sync_testing.fuzz import Mutator, besiege, find, hostile

pytestmark = pytest.mark.timeout(120)

VOCABULARY: list[dict[str, Any]] = [
    {"type": "hello", "worker": 0, "pid": 1, "nonce": "0" * 64},
    {"type": "take"},
    {"type": "take"},
    {"type": "key", "number": 1, "key": "0/1", "value": "AAAA"},
    {"type": "key", "number": 2, "key": "0/2", "value": "AAAA"},
    {"type": "received", "version": 1},
    {"type": "broken", "number": 1},
    {"type": "answer", "answer": Answer(version=1).to_message(), "held": [1]},
    {"type": "on", "version": 1, "held": [1, 2]},
    {"type": "lacks", "index": 1},
    {"type": "look"},
    {"type": "leave", "reason": "left"},
]
OPTIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "streams": {"shared_memory": False},
    "broadcast": {"topology": "broadcast"},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", OPTIONS)
def test_messages(way: str, seed: int) -> None:
    mutator = Mutator(seed, VOCABULARY)
    model = nn.Linear(2, 2)

    def attack(receiver: Receiver) -> None:
        send = hostile(next(find(receiver, Channel)), mutator)
        for _ in range(mutator.random.randrange(4)):
            send()

    sender = Sender("dist", model, num_workers=2, timeout=8.0, **OPTIONS[way])
    assert besiege(sender, model, attack, rounds=8 if way == "broadcast" else 30) > 1
