"""The scheme `rpc` does what every scheme does, whether its workers connect or are called."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from sync_core import Sender, SendReport
from sync_core.testing import SchemeConformance
from sync_core.testing.schemes.base import Start
from sync_core.testing.schemes.delivery import DeliveryCases
from sync_core.testing.schemes.faults import FaultCases
from sync_core.testing.schemes.pool import Pool, Workers
from sync_core.testing.schemes.worker import Worker

pytestmark = pytest.mark.timeout(90)


class TestRpc(SchemeConformance):
    scheme = "rpc"

    @pytest.fixture(autouse=True)
    def rpc_world(self, pool: Pool) -> None:
        """A sender of the scheme is made in a process that has joined a world of torch RPC."""
        pool.make_ready()


def host(worker: Worker, make: Callable[[], Any] | None) -> None:
    """Put the worker where the sender looks for it."""
    if make is not None:
        worker.model = make()
    vars(sys.modules["__main__"])["hosted"] = worker


class CalledWorkers(Workers):
    """Those of the pool, which commit what the sender calls them for; nobody asks for it."""

    def __init__(self, sender: Sender, pool: Pool, make: Callable[[], Any] | None) -> None:
        self._seen: dict[int, int] = {}
        self._waiting = ThreadPoolExecutor()
        super().__init__(sender, pool, make)

    def connect(self, *worker_ids: int, make: Callable[[], Any] | None = None) -> None:
        for worker_id in worker_ids:
            self.pool.call(worker_id, host, make)

    def submit(self, worker_id: int, timeout: float | None = None) -> Future[Any]:
        """Wait until the worker has what it was last called for."""
        return self._waiting.submit(self._arrived, worker_id, timeout or 20.0)

    def send(self, weights: Any = None, worker_ids: Iterable[int] | None = None) -> SendReport:
        return self.sender.send(weights, worker_ids)

    def end(self) -> None:
        self._waiting.shutdown()

    def _arrived(self, worker_id: int, timeout: float) -> int | None:
        deadline = time.monotonic() + timeout
        seen = self._seen.get(worker_id, 0)
        while time.monotonic() < deadline:
            status = self.sender.workers[worker_id]
            if seen < status.version == status.wanted:
                self._seen[worker_id] = status.version
                return status.version
            time.sleep(0.002)
        return None


class TestCalledRpc(DeliveryCases, FaultCases):
    """Delivery and faults, since all else is the same for workers that are called."""

    scheme = "rpc"
    called = True

    @pytest.fixture
    def start(self, pool: Pool) -> Iterator[Start]:
        with ExitStack() as cleared:

            def start(
                model: Any,
                num_workers: int = 2,
                *,
                make: Callable[[], Any] | None = None,
                **options: Any,
            ) -> Workers:
                workers = CalledWorkers(self.sender(model, num_workers, **options), pool, make)
                cleared.callback(workers.end)
                cleared.enter_context(workers.sender)
                return workers

            pool.make_ready()
            yield start

    @classmethod
    def sender(cls, model: Any, num_workers: int = 1, **options: Any) -> Sender:
        names = [f"worker{i}" for i in range(num_workers)]
        return Sender("rpc", model, workers=names, model_id="__main__:hosted.model", **options)
