"""The scheme of docs/examples/redis_pubsub.py, with a real server where one is installed."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sync_testing import SchemeConformance

pytest.importorskip("redis", reason="redis is not installed; type: pip install redis")
if shutil.which("redis-server") is None:
    pytest.skip(
        "redis-server is not installed; on Debian: apt install redis-server",
        allow_module_level=True,
    )

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.append(str(EXAMPLES))
redis_pubsub = importlib.import_module("redis_pubsub")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server that keeps nothing on disk."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        path = Path(folder, "redis.sock")
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--daemonize", "no"]
        command = ["redis-server", *options, "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                assert any("ready to accept" in line for line in server.stdout)
                yield f"unix://{path}"
            finally:
                server.terminate()
                server.communicate(timeout=10)


class TestRedisScheme(SchemeConformance):
    scheme = redis_pubsub.RedisScheme()

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, url: str) -> None:
        cls.options = {"url": url}


@pytest.mark.timeout(90)
def test_the_program(url: str) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLES / "redis_pubsub.py", url],
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
