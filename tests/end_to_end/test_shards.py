"""Sharded trainers and sharded workers, bit by bit."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.end_to_end import shard_world

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[dict[str, Any]]]:
    """The results of the seven processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "sync_core", "tests.end_to_end.shard_world"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.Queue()
    ranks = range(shard_world.TRAINERS + shard_world.WORKERS)
    processes = [
        context.Process(target=shard_world.main, args=(rank, port, results)) for rank in ranks
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=200) for _ in processes)
        yield [found[rank] for rank in ranks]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()


def test_no_process_of_the_world_fails(outcomes: list[dict[str, Any]]) -> None:
    assert [found["error"] for found in outcomes if "error" in found] == []


@pytest.mark.parametrize(("trainer", "worker"), shard_world.CASES)
def test_workers_have_the_bits_of_the_trainer(
    outcomes: list[dict[str, Any]], trainer: str, worker: str
) -> None:
    compared = [found.get(f"{trainer} to {worker}") for found in outcomes]
    workers = compared[shard_world.TRAINERS :][: shard_world.WORKER_KINDS[worker]]
    assert all(workers), compared


def test_regions_are_found_without_the_private_name_of_torch(
    outcomes: list[dict[str, Any]],
) -> None:
    assert all(found["fallback"] for found in outcomes[: shard_world.TRAINERS])
