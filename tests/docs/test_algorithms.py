"""The examples of algorithms learn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["ppo_discrete.py"])
def test_it_learns(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name), "--goal", "150"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 150
