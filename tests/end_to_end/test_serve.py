"""The program of docs/examples/ray_serve.py, in its own cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ray_serve.py"
NEEDED = ("fastapi", "uvicorn", "grpc_reflection")


@pytest.mark.timeout(280)
@pytest.mark.skipif(
    not all(map(find_spec, NEEDED)),
    reason='Ray Serve lacks modules; type: pip install "ray[serve]"',
)
def test_replicas_come_and_go_under_requests() -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=270, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    pools = re.findall(r"^version (\d+): replicas: (\d+)$", run.stdout, re.MULTILINE)
    assert [replicas for _, replicas in pools] == ["2", "4", "1"], run.stdout
    assert int(pools[-1][0]) >= 50
    (answers,) = re.findall(
        r"^(\d+) answers by \d+ replicas: none wrong, none lost", run.stdout, re.MULTILINE
    )
    assert int(answers) > 8 * 50
