"""The companions of docs/examples/companions.py: they work."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sync_core import Address, Receiver, Sender, SendError
from sync_testing import eventually

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "companions.py"
sys.path.append(str(EXAMPLE.parent))
companions = importlib.import_module("companions")

pytestmark = pytest.mark.timeout(60)


def send(sender: Sender, *receivers: Receiver) -> Any:
    """Send to workers of which only some receive."""
    pending = sender.send_async()
    for receiver in receivers:
        receiver.receive()
    return pending.wait()


def test_the_status_is_written_and_ends_with_the_sender(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with Sender("thread", nn.Linear(4, 2), num_workers=1) as sender:
        companions.StatusFile(sender, path)
        receiver = Receiver(sender.address(0), nn.Linear(4, 2))
        send(sender, receiver)
        status = json.loads(path.read_text())
        assert status["workers"] == {"0": {"state": "current", "version": 1}}
    assert not path.exists()


def test_a_pool_grows_and_shrinks() -> None:
    with Sender("thread", nn.Linear(4, 2), num_workers=0) as sender:
        pool = companions.OpenPool(sender)
        first, second = (Receiver(pool.join(), nn.Linear(4, 2)) for _ in range(2))
        assert send(sender, first, second).updated == (0, 1)
        first.close()
        assert eventually(lambda: sender.all_worker_ids() == (1,))
        assert send(sender, second).updated == (1,)


def test_a_worker_is_replaced_once_and_then_dropped() -> None:
    begun: list[Receiver] = []

    def start(address: Address) -> None:
        begun.append(Receiver(address, nn.Linear(4, 2)))

    respawn = companions.Respawn(start, times=1)
    with Sender(
        "thread", nn.Linear(4, 2), num_workers=1, on_failure=respawn, timeout=5.0
    ) as sender:
        start(sender.address(0))
        begun[0].close()
        assert send(sender).restarted == (0,)
        assert eventually(lambda: len(begun) == 2 and sender.workers[0].state != "restarting")
        assert send(sender, begun[1]).updated == (0,)
        begun[1].close()
        with pytest.raises(SendError) as failure:
            send(sender)
        assert failure.value.report.dropped == (0,)


def test_the_program() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=50, check=True
    )
    assert "version 1 to (0, 1) again ()" in done.stdout
    assert "the status was removed: True" in done.stdout
