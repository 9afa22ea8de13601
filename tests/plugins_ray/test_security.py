"""Objects in the store are payloads or refused; no Ray runs."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sync_core import Payload
from sync_core.errors import PayloadError
from sync_plugin_ray.mailbox import Event, Gone, Mailbox
from sync_plugin_ray.store import read

exploded: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return exploded.append, ("boom",)


BOMB = pickle.dumps(Bomb())
GRID = np.zeros((4, 8), dtype=np.uint8)

REFUSED: dict[str, Any] = {
    "a pickle": BOMB,
    "noise": bytes(range(200)),
    "no bytes": b"",
    "a pickle in a piece": [np.frombuffer(BOMB, dtype=np.uint8)],
    "no pieces": [],
    "none": None,
    "text": "weights",
    "pieces of text": ["weights"],
    "objects": [np.array([Bomb()], dtype=object)],
    "floats, which would be read past their end": [np.zeros(100)],
    "columns, likewise": [GRID[:, 0], GRID[:, 1]],
    "rows": [GRID],
    "a tensor of floats": torch.zeros(100),
    "a tensor of rows": torch.zeros(4, 8, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_payload_is_refused(name: str) -> None:
    with pytest.raises(PayloadError):
        Payload.unpack(read([REFUSED[name]]), version=1)
    assert exploded == []


def test_the_mailbox_tells_strangers_nothing() -> None:
    async def ask() -> None:
        mailbox = Mailbox("the token", {0: None})
        for token in ("", "another", "the token "):
            assert isinstance(
                await mailbox.join(token, Event("joined", 0, reader="stranger")), Gone
            )
        assert isinstance(await mailbox.take(0, "stranger", 0), Gone)
        assert isinstance(await mailbox.take(0, "", 0), Gone)
        joining = mailbox.join("the token", Event("joined", 0, reader="reader"))
        meeting = mailbox.update(1, {0: None}, {0: "reader"})
        refusal, _ = await asyncio.gather(joining, meeting)
        assert refusal is None
        assert await mailbox.take(0, "reader", 0) is None
        await mailbox.answer(Event("answered", 0, 1, reader="stranger"))
        assert [event.kind for event in await mailbox.events()] == ["joined"]

    asyncio.run(ask())
