"""Sharded senders over Ray: each shard is put once, and fetched by the workers that need it."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

from sync_core import Payload, Ranks, Receiver, Sender, join_addresses
from sync_plugin_ray.store import ObjectStore

pytestmark = pytest.mark.timeout(120)

ROWS, COLUMNS, RANKS = 8, 50_000, 2


@ray.remote(num_cpus=0)
class Worker:
    """Has some columns of a tensor."""

    def connect(self, address: Any, first: int, last: int) -> None:
        """Make the receiver."""
        self.model = {"w": torch.zeros(ROWS, last - first)}
        regions = {"w": ((0, ROWS), (first, last))}
        self.receiver = Receiver(address, self.model, regions=regions)

    def receive(self) -> int | None:
        """Commit a version."""
        return self.receiver.receive()

    def values(self) -> torch.Tensor:
        """What the worker has."""
        return self.model["w"]


def test_each_shard_is_put_once_for_all_workers_that_want_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put: list[int] = []
    original = ObjectStore.put

    def count(store: ObjectStore, payload: Payload) -> Any:
        put.append(payload.nbytes)
        return original(store, payload)

    monkeypatch.setattr(ObjectStore, "put", count)
    whole = torch.randn(ROWS, COLUMNS)
    half = ROWS // RANKS
    senders = [
        Sender(
            "ray",
            {"w": whole[rank * half : (rank + 1) * half]},
            num_workers=4,
            ranks=Ranks(rank, RANKS),
            regions={"w": ((rank * half, (rank + 1) * half), (0, COLUMNS))},
        )
        for rank in range(RANKS)
    ]
    # Two replicas of two tensor-parallel workers.
    columns = [(0, COLUMNS // 2), (COLUMNS // 2, COLUMNS)] * 2
    made: Any = Worker
    workers = [made.remote() for _ in columns]
    try:
        addresses = [join_addresses([sender.address(i) for sender in senders]) for i in range(4)]
        ray.get(
            [
                worker.connect.remote(address, *bounds)
                for worker, address, bounds in zip(workers, addresses, columns, strict=True)
            ]
        )
        received = [worker.receive.remote() for worker in workers]
        pending = [sender.send_async() for sender in senders]
        assert all(each.wait().updated == (0, 1, 2, 3) for each in pending)
        assert ray.get(received) == [1] * 4
        for worker, (first, last) in zip(workers, columns, strict=True):
            assert torch.equal(ray.get(worker.values.remote()), whole[:, first:last])
        # Each half of each rank's shard once, for both replicas.
        large = [nbytes for nbytes in put if nbytes > 10_000]
        assert len(large) == 2 * RANKS
        assert sum(large) < 1.01 * whole.nbytes
    finally:
        for sender in senders:
            sender.close()
        for worker in workers:
            ray.kill(worker)
