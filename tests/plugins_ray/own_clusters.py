"""Groups and senders that begin and outlive their own clusters; run by a test."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle

from sync_core import Address, ClosedError, Receiver, Sender, SendError, WorkerLostError
from sync_plugin_ray.group import RayGroup

CONFIG: dict[str, Any] = {
    "address": "local",
    "num_cpus": 2,
    "object_store_memory": 10**8,
    "include_dashboard": False,
    "logging_level": "error",
}


class Host:
    """Without tensors, for which its process would have to import torch."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id

    def pid(self) -> int:
        return os.getpid()


class Agent:
    def __init__(self, size: int = 2) -> None:
        self.policy = {name: torch.zeros(size) for name in "ab"}

    def connect(self, address: Address) -> None:
        self.receiver = Receiver(address, self.policy)


def shut_down_before_they_stop() -> None:
    """Ray, which a group began, ends before the group and two senders do, and begins again."""
    group = RayGroup(Host, 2, ray_init_config=CONFIG)
    say("workers", *pids(group))
    call = group.call(0, lambda _: time.sleep(60))
    actor: Any = ray.remote(Agent).options(num_cpus=0).remote()
    weights = {name: torch.ones(2) for name in "ab"}
    sender = Sender("ray", weights, workers=[actor], timeout=150)
    sender.send()
    silent: Any = ray.remote(Agent).options(num_cpus=0).remote()
    waiting = Sender("ray", {name: torch.ones(2) for name in "ab"}, num_workers=1)
    ray.get(silent.connect.remote(waiting.address(0)))
    pending = waiting.send_async()
    # Whether the silent worker lives is asked in the middle of the end.
    time.sleep(0.3)
    ray.shutdown()
    with pytest.raises(WorkerLostError, match="Ray was shut down"):
        call.result(60)
    with pytest.raises(SendError, match="Ray was shut down"):
        pending.wait(60)
    # No Ray was started to ask it.
    assert not ray.is_initialized()
    waiting.remove_worker(0)
    waiting.close()
    assert not group.alive(0)
    uses: list[Callable[[], object]] = [
        group.add,
        lambda: group.call(0, Host.pid),
        lambda: group.restart(0),
        sender.send,
    ]
    closed = "Ray was shut down since this was made; make a new one"
    for use in uses:
        with pytest.raises(ClosedError, match=closed):
            use()
    group.stop()
    assert not ray.is_initialized()
    ray.init(**CONFIG)
    with pytest.raises(ClosedError, match=closed):
        sender.send()
    sender.close()
    assert ray.is_initialized()


def shut_down_on_demand() -> None:
    """Ray, which the user began, ends with a group only where that is asked for."""
    with RayGroup(Host, 1, shutdown_ray=False) as group:
        say("workers", *pids(group))
    assert ray.is_initialized()
    with RayGroup(Host, 1, shutdown_ray=True) as group:
        say("workers", *pids(group))
    assert not ray.is_initialized()


def left_by_the_group() -> None:
    """Ray, which a group began, ends with it, and not with a fork of this process."""
    group = RayGroup(Host, 2, ray_init_config=CONFIG)
    say("workers", *pids(group))
    # Only the group must be freed in the fork: Ray's locks stay as they were, and to free
    # a reference there stands still when a thread had one (4 of 85 forks, with Ray alone).
    gc.collect()
    fork = os.fork()
    if not fork:
        parts, forgotten = vars(group).copy(), weakref.ref(group)
        del group
        os._exit(0 if parts and forgotten() is None else 1)
    assert os.waitpid(fork, 0)[1] == 0
    time.sleep(1)
    assert all(map(group.alive, group.worker_ids))
    group.stop()
    assert not ray.is_initialized()


def send_when_the_main_thread_has_ended() -> None:
    ray.init(**CONFIG)
    actor: Any = ray.remote(Agent).options(num_cpus=0).remote(2_200_000)
    weights = {name: torch.ones(2_200_000) for name in "ab"}
    threading.main_thread().join()
    with Sender("ray", weights, workers=[actor], timeout=150) as sender:
        assert sender.send().updated == (0,)
    ray.shutdown()
    say("done")


def pids(group: RayGroup) -> list[int]:
    return [group.call(i, Host.pid).result() for i in group.worker_ids]


def fail(error: threading.ExceptHookArgs) -> None:
    """End with the exit code of an error, which an error in a thread does not set."""
    traceback.print_exception(error.exc_value)
    os._exit(1)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    shut_down_before_they_stop()
    shut_down_on_demand()
    left_by_the_group()
    threading.excepthook = fail
    threading.Thread(target=send_when_the_main_thread_has_ended).start()
