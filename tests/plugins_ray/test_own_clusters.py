"""Clusters that begin and end with a worker group, or before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sync_testing import eventually

pytestmark = pytest.mark.long


@pytest.mark.timeout(500)
def test_clusters_of_their_own(run_script: Callable[[str, float], list[str]]) -> None:
    # Ray may have a line to say about those that it lost.
    said = [line.split() for line in run_script("own_clusters.py", 480)]
    assert said[-1] == ["done"]
    pids = [int(pid) for kind, *numbers in said if kind == "workers" for pid in numbers]
    assert len(pids) == 6
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)
