"""The rollout's end of a checkpoint engine, without Ray."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from sync_core import Sender
from sync_plugin_verl.rollout import RolloutEnd

pytestmark = pytest.mark.timeout(120)


async def _step(end: RolloutEnd, sender: Sender, step: int) -> dict[str, Tensor]:
    """Send a step, and return what the rollout has received of it."""
    pending = sender.send_async({"w": torch.full((2,), float(step))}, version=step + 1)
    held = {name: tensor.clone() async for name, tensor in end.receive(step)}
    await asyncio.to_thread(pending.wait)
    return held


async def _is_dropped_and_gets_an_address(end: RolloutEnd) -> None:
    with Sender("shm", {"w": torch.zeros(2)}, num_workers=1, timeout=60.0) as sender:
        end.join("trainer", 0)
        end.deliver(sender.address(0))
        assert (await _step(end, sender, 0))["w"].tolist() == [0.0, 0.0]
        sender.remove_worker(0)
        end.deliver(sender.address(sender.add_worker()))
        end.join("trainer", 1)
        assert (await _step(end, sender, 1))["w"].tolist() == [1.0, 1.0]
    end.close()


def test_an_address_that_comes_before_a_dropped_rollout_receives_is_used() -> None:
    asyncio.run(_is_dropped_and_gets_an_address(RolloutEnd(timeout=40.0)))
