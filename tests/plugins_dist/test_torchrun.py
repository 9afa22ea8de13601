"""The script of docs/how-to/torchrun.md runs as the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "torchrun_weights.py"


@pytest.mark.timeout(90)
def test_two_workers_under_torchrun() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", SCRIPT],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "version 5: workers (0, 1)" in run.stdout
    for rank in (1, 2):
        assert f"rank {rank}: version 5, weights 5.0" in run.stdout
