"""Clusters that begin and end with a worker group, or before it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sync_core.testing.worker_groups import eventually


@pytest.mark.timeout(180)
def test_clusters_of_their_own() -> None:
    # A process has one Ray, and the other tests of this session share theirs.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("own_clusters.py"))],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Ray may have a line to say about those that it lost.
    said = [line.split() for line in done.stdout.splitlines()]
    assert said[-1] == ["done"]
    pids = [int(pid) for kind, *numbers in said if kind == "workers" for pid in numbers]
    assert len(pids) == 8
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
