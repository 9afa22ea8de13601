"""`dist` in a forked process, and with workers that join and leave."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from sync_core import Receiver, Sender
from sync_plugin_dist.process_group import TensorGroup
from sync_plugin_dist.rendezvous import Rendezvous
from sync_plugin_dist.stream import WorkerStream
from sync_plugin_std.local import SharedMemory
from sync_testing import count_threads, eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(60)]

# A lock is held while it forks, as any other thread may do.
_FORK = """
import os, sys, threading, torch
from sync_core import Receiver, Sender

target = {"w": torch.zeros(4)}
sender = Sender("dist", {"w": torch.ones(4)}, num_workers=1, shared_memory=bool(sys.argv[1:]))
receiver = Receiver(sender.address(0), target)

def exchange():
    pending = sender.send_async()
    receiver.receive()
    assert pending.wait().updated == (0,)

def hold():
    with sender._pipeline.transport.publisher.lock:
        held.set()
        over.wait()

exchange()
held, over = threading.Event(), threading.Event()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
children = []
for act in (lambda: None, lambda: (receiver.close(), sender.close())):
    children.append(os.fork())
    if not children[-1]:
        act()
        sys.exit(7)
over.set()
thread.join()
# An exit takes as long as torch does, which is seconds on a busy machine; a hang has no end.
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
target["w"].zero_()
exchange()
print(target["w"].sum().item())
receiver.close()
sender.close()
"""


@pytest.mark.parametrize("shared_memory", [[], ["shared"]])
def test_forked_children_end_and_harm_nobody(shared_memory: list[str]) -> None:
    script = [sys.executable, "-c", _FORK, *shared_memory]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.stdout.split(), ended.stderr) == (["7", "7", "4.0"], "")


_END = """
import atexit

class Group:
    def __del__(self):
        print("freed")

# Called after the functions that the module registers.
atexit.register(lambda: process_group.free([Group()]))
from sync_plugin_dist import process_group
process_group.free([Group()])
print("ends")
"""


def test_nothing_is_freed_while_the_process_ends() -> None:
    script = [sys.executable, "-c", _END]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.stdout.split(), ended.stderr) == (["freed", "ends"], "")


@pytest.mark.parametrize(
    "options", [{}, {"shared_memory": False}, {"topology": "broadcast"}], ids=str
)
def test_workers_that_come_and_go_leave_nothing(options: dict[str, Any]) -> None:
    weights = {"w": torch.ones(4)}
    with Sender("dist", weights, num_workers=0, **options) as sender:

        def come_and_go() -> None:
            worker_id = sender.add_worker()
            with Receiver(sender.address(worker_id), {"w": torch.zeros(4)}) as receiver:
                pending = sender.send_async(worker_ids=[worker_id])
                receiver.receive()
                assert pending.wait().updated == (worker_id,)
                sender.remove_worker(worker_id)

        # Each of the first two makes a slot, of which two are enough.
        for _ in range(2):
            come_and_go()
        before = held()
        for _ in range(10):
            come_and_go()
        assert eventually(lambda: no_more_than(before), 10), (before, held())
        for _ in range(300):
            sender.remove_worker(sender.add_worker())
        assert no_more_than(before), (before, held())


def no_more_than(before: tuple[int, ...]) -> bool:
    return all(now <= then for now, then in zip(held(), before, strict=True))


def held() -> tuple[int, ...]:
    """Return how many there are of what a worker takes."""
    gc.collect()
    kinds = (WorkerStream, SharedMemory, TensorGroup, Rendezvous)
    objects = [sum(type(o) is kind for o in gc.get_objects()) for kind in kinds]
    return *objects, count_threads(), psutil.Process().num_fds()
