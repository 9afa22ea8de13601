"""Sharded senders over Ray: each shard is put once, and fetched by the workers that need it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from tests.plugins_ray.agents import Agent

from sync_core import Payload, Receiver, Sender
from sync_plugin_ray.store import ObjectStore
from sync_plugin_scale import Part, Sharded, join_addresses

pytestmark = pytest.mark.timeout(120)

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, COLUMNS, RANKS = 8, 50_000, 2


Bounds = tuple[int, int]


def connect(agent: Agent, places: dict[int, tuple[Any, Bounds]]) -> None:
    """Make receivers of some columns of a tensor, by worker."""
    agent.parts = {}
    for worker_id, (address, (first, last)) in places.items():
        model = {"w": torch.zeros(ROWS, last - first)}
        receiver = Receiver(address, Part(model, {"w": ((0, ROWS), (first, last))}))
        agent.parts[worker_id] = (receiver, model["w"])


def receive(agent: Agent) -> dict[int, tuple[int | None, torch.Tensor]]:
    """Commit a version in each receiver; the version, and what the worker has then."""
    return {i: (receiver.receive(), part) for i, (receiver, part) in agent.parts.items()}


@pytest.mark.long
def test_each_shard_is_put_once_for_all_workers_that_want_it(
    actors: list[Any], monkeypatch: pytest.MonkeyPatch
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
            Sharded("ray", rank, RANKS, {"w": ((rank * half, (rank + 1) * half), (0, COLUMNS))}),
            {"w": whole[rank * half : (rank + 1) * half]},
            num_workers=4,
        )
        for rank in range(RANKS)
    ]
    # Two replicas of two tensor-parallel workers, a replica in each actor.
    columns = [(0, COLUMNS // 2), (COLUMNS // 2, COLUMNS)] * 2
    replicas = ((0, 1), (2, 3))
    try:
        addresses = [join_addresses([sender.address(i) for sender in senders]) for i in range(4)]
        for actor, workers in zip(actors, replicas, strict=True):
            places = {i: (addresses[i], columns[i]) for i in workers}
            ray.get(actor.__ray_call__.remote(connect, places))
        received = [actor.__ray_call__.remote(receive) for actor in actors]
        pending = [sender.send_async() for sender in senders]
        assert all(each.wait().updated == (0, 1, 2, 3) for each in pending)
        got = ray.get(received[0]) | ray.get(received[1])
        for worker_id, (first, last) in enumerate(columns):
            version, part = got[worker_id]
            assert version == 1
            assert torch.equal(part, whole[:, first:last])
        # Each half of each rank's shard once, for both replicas.
        large = [nbytes for nbytes in put if nbytes > 10_000]
        assert len(large) == 2 * RANKS
        assert sum(large) < 1.01 * whole.nbytes
    finally:
        for sender in senders:
            sender.close()
