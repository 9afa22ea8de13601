"""A killed worker is noticed at once, also where another process has its end of the connection."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch import nn

from sync_core import Address, Receiver, Sender, SendError, WorkerLostError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs descriptors of processes"),
]


def _receive(address: Address, news: Connection, holder: str | None) -> None:
    receiver = Receiver(address, nn.Linear(2, 2))
    if holder == "child" and os.fork() == 0:
        # It inherits the worker's end, and outlives the worker.
        signal.alarm(100)
        news.recv()
        os._exit(0)
    while True:
        news.send(receiver.receive(timeout=60.0))


@pytest.mark.parametrize(
    ("scheme", "holder"), [("mp", "trainer"), ("mp", "child"), ("shm", "child")]
)
def test_a_killed_worker_whose_end_another_holds(scheme: str, holder: str) -> None:
    context: Any = multiprocessing.get_context("fork" if holder == "child" else "spawn")
    mine, its = context.Pipe()
    with Sender(scheme, nn.Linear(2, 2), num_workers=1, timeout=60.0) as sender:
        address = sender.address(0)
        held = address.endpoint._open_end().dup() if holder == "trainer" else None
        worker = context.Process(target=_receive, args=(address, its, holder), daemon=True)
        worker.start()
        try:
            sender.send()
            assert mine.recv() == 1
            pending = sender.send_async()
            assert mine.recv() == 2
            pending.wait()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            begun = time.monotonic()
            with pytest.raises(SendError) as failure:
                sender.send()
            assert time.monotonic() - begun < 20.0
            error = failure.value.report.workers[0].error
            assert isinstance(error, WorkerLostError)
            assert f"its process {worker.pid} is gone" in str(error)
        finally:
            mine.send(None)
            worker.kill()
            worker.join(10)
            if held is not None:
                held.close()
