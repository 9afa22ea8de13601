"""A worker that keeps to no protocol costs its own place, and never that of another worker."""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sync_core import Answer, Receiver, Sender
from sync_plugin_std.local import Channel, SharedMemoryReceiver
from sync_plugin_std.local.control_page import _ANSWER, _ANSWER_AT, _CHECKSUM
from sync_plugin_std.stores.store import Records
from sync_plugin_std.stores.transport import StoreReceiver
from sync_testing.fuzz import Mutator, besiege, find, hostile

pytestmark = pytest.mark.timeout(120)

ANSWER = Answer(version=1).to_message()
AGAIN = Answer(version=1, error="lacks them", request="again").to_message()
LACKS = Answer(version=1, error="lacks it", failure="increment").to_message()
VOCABULARY: list[dict[str, Any]] = [
    {"type": "hello", "worker": 0, "pid": 1, "nonce": "0" * 64},
    *({"type": "answer", "answer": each, "held": [1]} for each in (ANSWER, AGAIN, LACKS)),
    {"type": "on", "version": 1, "held": [1, 2]},
    {"type": "lacks", "index": 1},
    {"type": "look"},
    {"type": "pipe"},
    {"type": "leave", "reason": "left"},
    {"type": "gone", "reason": "gone"},
]


def write_noise(transport: SharedMemoryReceiver, random_: random.Random) -> None:
    """Write an answer of any content, with its checksum, and have it read."""
    record = random_.randbytes(_ANSWER.size)
    if random_.random() < 0.5:
        times = [0.0] * 5
        held = [random_.randrange(4) for _ in range(16)]
        record = _ANSWER.pack(random_.randrange(9), 0, *times, random_.randrange(20), *held)
    transport._page._bytes[_ANSWER_AT] = record + _CHECKSUM.pack(zlib.crc32(record))
    transport._answers.set()


@pytest.mark.fuzz
@pytest.mark.parametrize("scheme", ["shm", "mp", "chunked::shm", "increments::chunked::mp"])
def test_messages(scheme: str, seed: int) -> None:
    mutator = Mutator(seed, VOCABULARY)
    # Two chunks.
    model = nn.Linear(1_100, 1_000) if "chunked" in scheme else nn.Linear(2, 2)

    def attack(receiver: Receiver) -> None:
        # A chain has several of them.
        for transport in find(receiver, SharedMemoryReceiver):
            send = hostile(next(find(transport, Channel)), mutator)
            if mutator.random.random() < 0.5:
                receiver.receive(0.0)
            if mutator.random.random() < 0.5:
                write_noise(transport, mutator.random)
            for _ in range(mutator.random.randrange(4)):
                send()

    assert besiege(Sender(scheme, model, num_workers=2, timeout=20.0), model, attack, rounds=40) > 5


@pytest.mark.fuzz
def test_records(seed: int, tmp_path: Path) -> None:
    mutator = Mutator(seed, [{"beats": 1, "wanted": {"0": 1}}])
    model = nn.Linear(2, 2)

    def attack(receiver: Receiver) -> None:
        (transport,) = find(receiver, StoreReceiver)
        records = next(find(transport, Records))
        transport._pulse.end()
        answer = ANSWER | {"version": mutator.random.randrange(40)}
        record = {
            "owner": transport._owner,
            "process": 1,
            "host": "here",
            "beats": time.monotonic(),
            "answer": answer,
            "left": None,
        }
        if mutator.random.random() < 0.2:
            name = records._path("worker-1.json")
            records._store.put(name, mutator.data(records._store.get(name) or b""))
        records.write("worker-1.json", mutator.message(record))

    sender = Sender(
        "file", model, num_workers=2, timeout=20.0, directory=str(tmp_path), lost_after=1.0
    )
    assert besiege(sender, model, attack, rounds=40) > 3
