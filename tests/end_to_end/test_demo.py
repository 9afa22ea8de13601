"""The demo learns CartPole, draws its picture, and says so when it did not learn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "docs" / "examples" / "cartpole.py"


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.timeout(120)
@pytest.mark.long
def test_it_learns(tmp_path: Path) -> None:
    out = tmp_path / "out" / "cartpole.png"
    result = run(out)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Reached the goal of 450" in result.stdout
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(60)
@pytest.mark.long
def test_another_scheme_and_too_few_frames(tmp_path: Path) -> None:
    result = run(
        tmp_path / "cartpole.png",
        "--scheme",
        "thread",
        "--ahead",
        "--frames",
        "3000",
        "--seed",
        "1",
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Missed the goal of 450" in result.stdout
    assert (tmp_path / "cartpole.png").exists()
