"""More than one machine: three nodes here, with an object store each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(240)
def test_weights_cross_to_a_node_once_and_nodes_come_and_go() -> None:
    # A process has one Ray, and the other tests of this session share theirs.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("three_nodes.py"))],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.split()[0] in WORDS]
    assert [line.split()[0] for line in said] == WORDS
    assert said[0] == "workers 4 copies 3"


WORDS = ["workers", "removed", "joined", "pulled"]
