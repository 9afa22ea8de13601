"""The files in shared memory that the suite counts as left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sync_testing.schemes.lifetime import _left_since, _shared_memory

STRANGER = """
import mmap, os, sys
# Its parent ends, so that the test does not count it as its own.
if os.fork():
    os._exit(0)
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    used = mmap.mmap(file.fileno(), 4096)
os.write(int(sys.argv[2]), b"!")
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="shared memory is not mounted")
@pytest.mark.timeout(60)
def test_what_another_program_uses_is_not_left_behind() -> None:
    before = _shared_memory()
    path = Path("/dev/shm", f"sync-test-{uuid.uuid4().hex}")
    said, says = os.pipe()
    # The process that mapped it holds the other end of the pipe, and so ends with the test.
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(path), str(says)],
        stdin=subprocess.PIPE,
        pass_fds=[says],
    )
    os.close(says)
    try:
        stranger.wait(30)
        assert os.read(said, 1) == b"!"
        assert path.name in _shared_memory() - before
        assert path.name not in _left_since(before)
        assert stranger.stdin is not None
        stranger.stdin.close()
        assert os.read(said, 1) == b"", "the process has ended"
        assert path.name in _left_since(before)
    finally:
        os.close(said)
        path.unlink(missing_ok=True)
