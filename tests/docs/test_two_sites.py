"""The program of the tutorial learns with two sites that share a directory and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


def test_two_sites_learn() -> None:
    command = [sys.executable, str(ROOT / "docs" / "examples" / "two_sites.py"), "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"mean reward (\S+)", done.stdout)]
    assert len(rewards) == 3
    assert rewards[-1] > rewards[0] + 0.1
