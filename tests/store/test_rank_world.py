"""Trainers whose models torch cuts write a run together; readers compare it bit by bit."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.shard_world import TRAINERS, WORKER_KINDS, WORKERS
from tests.store import rank_world

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The results of the seven processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "sync_core", "tests.store.rank_world"])
    directory = tmp_path_factory.mktemp("runs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.Queue()
    processes = [
        context.Process(target=rank_world.main, args=(rank, port, directory, results))
        for rank in range(TRAINERS + WORKERS)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=280) for _ in processes)
        yield [found[rank] for rank in range(TRAINERS + WORKERS)]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()


def test_no_process_of_the_world_fails(outcomes: list[dict[str, Any]]) -> None:
    assert [found["error"] for found in outcomes if "error" in found] == []


@pytest.mark.parametrize("case", rank_world.CASES, ids=rank_world.name_of)
def test_readers_have_the_bits_of_the_trainer(outcomes: list[dict[str, Any]], case: Any) -> None:
    compared = [found.get(rank_world.name_of(case)) for found in outcomes]
    readers = compared[TRAINERS:][: WORKER_KINDS[case[1]]]
    assert all(readers), compared


def test_the_example_publishes_and_reads(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "examples" / "sharded_run.py"
    url = str(tmp_path / "run")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    trained = printed(*torchrun, "train", url, str(tmp_path / "trainer.pem"))
    key, output = re.search("key ([0-9a-f]{64})", trained), re.search("3: output (.+)", trained)
    assert key is not None
    assert output is not None
    read = printed(sys.executable, str(script), "read", url, key[1])
    assert read == f"reader: version 3, output {output[1]}\n"


def printed(*command: str) -> str:
    """Run a program; return what it has printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
