"""Ranks whose stores fail at random: no version has parts of two steps, and all is mended."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.store.rank_trainers import (
    blank,
    check,
    published,
    shard,
    trainer,
    transport_of,
)

from sync_core import Receiver, Sender
from sync_plugin_store import Run, StoreError

SIZE, STEPS = 3, 40
# Each fails before it is done, or after it, when the answer is lost, or is interrupted.
METHODS = ("put", "look", "list", "swap")


def let_fail(sender: Sender, chance: float, draw: random.Random) -> Callable[[], None]:
    """Let calls of a rank's store fail; return what ends that."""
    objects = transport_of(sender)._objects

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            drawn = draw.random()
            if drawn < chance / 3:
                raise StoreError("the store is down")
            if drawn < chance / 2:
                raise KeyboardInterrupt
            found = real(*arguments)
            if drawn < chance:
                raise StoreError("the answer was lost")
            return found

        return call

    for name in METHODS:
        setattr(objects, name, failing(getattr(objects, name)))

    def end() -> None:
        for name in METHODS:
            delattr(objects, name)

    return end


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_no_version_has_parts_of_two_steps(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with trainer(tmp_path, SIZE, keep=2) as ranks:
        published(ranks.send(0.0), 1)
        key = transport_of(ranks.senders[0])._key.public
        for sender in ranks.senders:
            transport_of(sender)._timeout = 0.3
        for step in range(1, STEPS):
            chance = draw.choice((0.0, 0.02, 0.1))
            ends = [let_fail(sender, chance, draw) for sender in ranks.senders]
            # A rank that raises before its send begins does not count the version.
            late = draw.randrange(SIZE) if draw.random() < 0.1 else None

            def send(rank: int, step: int = step, late: int | None = late) -> None:
                try:
                    if rank != late:
                        ranks.senders[rank].send(shard(step, rank, SIZE))
                except (StoreError, KeyboardInterrupt):
                    pass

            with ThreadPoolExecutor(SIZE) as pool:
                list(pool.map(send, range(SIZE)))
            for end in ends:
                end()
            with Run(str(tmp_path / "run"), key) as run:
                model = blank()
                with Receiver(run.address(), model) as reader:
                    assert reader.receive(20.0) == run.version
                check(model, float(model["bias"][0]))
        for sender in ranks.senders:
            sender.advance(2 * STEPS)
            transport_of(sender)._timeout = 30.0
        for more in (1, 2):
            published(ranks.send(STEPS + more), 2 * STEPS + more)
    for path in (tmp_path / "run" / "objects").iterdir():
        os.utime(path, (1.0, 1.0))
    with trainer(tmp_path, SIZE, keep=2, version=2 * STEPS + 2):
        # Of two versions, a header and a piece of each rank; what ranks hold; the address.
        left = list((tmp_path / "run" / "objects").iterdir())
        assert len(left) <= 2 * 2 * SIZE + 1 + SIZE + 1
