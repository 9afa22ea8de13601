"""A commit counts at once, in each way to commit, while another worker is silent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sync_core import Receiver, Sender, SendError

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("way", ["receive", "background"])
@pytest.mark.parametrize("scheme", ["thread", "shm", "mp", "dist", "file", "chunked::dist"])
def test_an_answer_counts_while_another_worker_is_silent(
    scheme: str, way: str, silent: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"directory": str(tmp_path)} if scheme == "file" else {}
    with (
        Sender(scheme, nn.Linear(4, 4), num_workers=2, timeout=50.0, **options) as sender,
        Receiver(sender.address(0), nn.Linear(4, 4), background=way == "background") as first,
        Receiver(sender.address(1), nn.Linear(4, 4), background=way == "background") as second,
        ThreadPoolExecutor(1) as threads,
    ):
        receiver = (second, first)[silent]
        pending = sender.send_async()
        waiting = threads.submit(pending.wait)
        try:
            assert receiver.receive(timeout=20.0) == 1
            assert pending.deliveries[1 - silent].wait(10.0)
            assert not pending.deliveries[silent].ended
        finally:
            pending.abandon()
        failure = waiting.exception(20.0)
    assert isinstance(failure, SendError)
    assert failure.report.updated == (1 - silent,)
