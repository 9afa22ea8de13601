"""An S3 server on this machine, by moto, and an end of what tests leave open."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def ends_publishers() -> Iterator[None]:
    """End the threads of publishers and readers that a test did not close, which end with these."""
    yield
    if any(thread.name.startswith("sync-store") for thread in threading.enumerate()):
        gc.collect()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """The URL of an S3 server, in a separate process."""
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    # Unbuffered, as its port is read from what it prints.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stderr is not None
            found = None
            while found is None:
                line = server.stderr.readline()
                assert line, "the S3 server must start: pip install 'moto[server]'"
                found = re.search(r"http://127\.0\.0\.1:\d+", line)
            # Its line for each request must not fill the pipe.
            reading = threading.Thread(target=server.stderr.read, daemon=True)
            reading.start()
            yield found[0]
        finally:
            server.kill()
            server.wait()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket, and the environment that reaches it."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "writer",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    request = urllib.request.Request(f"{s3_server}/weights", method="PUT")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200
    return "s3://weights"
