"""The scheme of docs/examples/redis_pubsub.py, with a real server where one is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sync_testing import SchemeConformance

pytest.importorskip("redis", reason="redis is not installed; type: pip install redis")
pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.append(str(EXAMPLES))
redis_pubsub = importlib.import_module("redis_pubsub")


class TestRedisScheme(SchemeConformance):
    scheme = redis_pubsub.RedisScheme()

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, redis_url: str) -> None:
        cls.options = {"url": redis_url}


@pytest.mark.timeout(90)
def test_the_program(redis_url: str) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLES / "redis_pubsub.py", redis_url],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
        # Without a buffer, a line and its end are two writes, between which others print.
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert run.returncode == 0, run.stderr
    lines = sorted(run.stdout.splitlines())
    assert lines == [
        *(f"version {version}: workers (0, 1)" for version in (1, 2, 3)),
        *(f"worker {i}: version 3, bias [2.0, 2.0]" for i in (0, 1)),
    ]
