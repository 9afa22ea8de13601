"""The demo with a language model learns, in its smallest form: 2 million parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

DEMO = Path(__file__).parents[2] / "docs" / "examples" / "grpo.py"


@pytest.mark.timeout(300)
def test_it_learns_to_answer_with_a_bare_number(tmp_path: Path) -> None:
    out = tmp_path / "grpo.png"
    command = [sys.executable, str(DEMO), "--model", "tiny", "--engine", "hf", "--out", str(out)]
    options = ["--steps", "16", "--prompts", "4", "--seeds", "0"]
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, timeout=280
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "in the last: learned" in result.stdout.replace("\n", " ")
    # Each sample carries the version that made it: the one of its step.
    assert "│    0 │   16 │" in result.stdout
    assert out.read_bytes().startswith(b"\x89PNG")
