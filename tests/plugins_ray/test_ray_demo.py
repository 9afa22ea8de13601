"""The demo runs over Ray, in a cluster that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

pytestmark = pytest.mark.long

DEMO = Path(__file__).parents[2] / "docs" / "examples" / "cartpole.py"


@pytest.mark.timeout(120)
def test_it_runs_over_ray(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--out", str(tmp_path / "cartpole.png")]
    options = ("--scheme", "ray", "--workers", "1", "--frames", "2048", "--seed", "1")
    # It joins the cluster of the tests: to start another takes seconds.
    cluster = ray.get_runtime_context().gcs_address
    drivers = len(ray._private.state.jobs())
    result = subprocess.run(
        [*command, *options],
        env={**os.environ, "RAY_ADDRESS": cluster},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert "Missed the goal of 450" in result.stdout, result.stdout + result.stderr
    assert len(ray._private.state.jobs()) == drivers + 1
