"""Workers that have no memory in which to put a version together."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from contextlib import suppress
from torch import nn
from sync_core import CapacityError, Receiver, Sender, SendError

source, target = nn.Linear(3000, 1000), nn.Linear(3000, 1000)
with Sender(sys.argv[1], source, num_workers=1, timeout=30) as sender:
    with Receiver(sender.address(0), target) as receiver:
        pending = sender.send_async()
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]) * 1_000_000, -1))
        with suppress(CapacityError):
            receiver.receive(1.0)
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        try:
            pending.wait()
        except SendError as error:
            print("cannot be allocated" in str(error), receiver.version)
        pending = sender.send_async()
        print(receiver.receive(), pending.wait().updated, torch.equal(source.weight, target.weight))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
@pytest.mark.parametrize(
    ("scheme", "megabytes"), [("increments::shm", 18), ("chunked::shm", 10), ("file", 10)]
)
def test_the_sender_learns_at_once_that_a_worker_has_no_memory(scheme: str, megabytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, scheme, str(megabytes)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["True 0", "2 (0,) True"], done.stderr
