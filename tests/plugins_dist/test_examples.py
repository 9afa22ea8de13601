"""The scripts of docs/how-to/torchrun.md and sharded-models.md run as the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.timeout(90)
def test_two_workers_under_torchrun() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=3",
            EXAMPLES / "torchrun_weights.py",
        ],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "version 5: workers (0, 1)" in run.stdout
    for rank in (1, 2):
        assert f"rank {rank}: version 5, weights 5.0" in run.stdout


@pytest.mark.timeout(90)
def test_a_sharded_trainer_and_tensor_parallel_workers() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=4",
            EXAMPLES / "sharded_weights.py",
        ],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    for version in (1, 2, 3):
        line = rf"version {version}: workers \(0, 1\), output (-?\d+\.\d{{4}})"
        sent = re.search(line, run.stdout)
        assert sent is not None
        for worker in (0, 1):
            assert f"worker {worker}: version {version}, output {sent[1]}" in run.stdout


@pytest.mark.timeout(90)
def test_two_workers_of_torch_rpc() -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLES / "torch_rpc.py"],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "tensorpipe" not in run.stderr
    assert run.stdout.splitlines() == [
        *(f"version {version}: workers (0, 1)" for version in (1, 2, 3)),
        *(f"worker{i}: bias [2.0, 2.0]" for i in (0, 1)),
    ]
