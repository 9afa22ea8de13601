"""Worlds of torch RPC for tests, one after the other in one process."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import rpc

from sync_plugin_dist.rpc_group import RpcGroup
from sync_plugin_dist.rpc_world import initialised
from sync_plugin_std.workers import start_process

_NAMES = ("worker0", "worker1", "worker2")


class RpcProcesses:
    """A world of this process, ``trainer``, and others that end when it does.

    Args:
        names: of the others.
        setup: Python source that they run in their main module before they join.
    """

    def __init__(self, names: Sequence[str], setup: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory()
        store, size = str(Path(self._folder.name) / "store"), len(names) + 1
        # The private numbers: processes meet under how many worlds each has joined before, and
        # what was gathered in worlds of the same names; those of a new process and of this one
        # would differ.
        known = [str(size), store, str(rpc._init_counter)]
        ending, self._alive = os.pipe()
        main = f"{__name__}:join"
        self.processes = {
            name: start_process(main, setup, name, str(rank), *known, fds=[ending])
            for rank, name in enumerate(names, 1)
        }
        os.close(ending)
        rpc.api._all_gather_sequence_id.clear()
        _init("trainer", 0, size, store)

    def end(self) -> None:
        """Leave, and end the others."""
        if initialised():
            rpc.shutdown(graceful=False)
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.exited(20)
        os.close(self._alive)
        self._folder.cleanup()

    @property
    def complete(self) -> bool:
        """Return whether all of the others can be reached: one that is ending may yet be alive."""
        try:
            for reply in [rpc.rpc_async(name, os.getpid, timeout=10) for name in self.processes]:
                reply.wait()
        except RuntimeError:
            return False
        return True


def join(ending: int, setup: str, *member: str) -> None:
    """Join a world until the trainer has ended; runs in a process that was started for it."""
    name, rank, size, store, known = member
    # What torch says of processes that tests have killed.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    exec(setup, vars(sys.modules["__main__"]))
    rpc._init_counter = int(known)
    _init(name, int(rank), int(size), store)
    os.read(ending, 1)
    os._exit(0)


def _init(name: str, rank: int, size: int, store: str) -> None:
    # Through shared memory, one that is stopped may keep others from being heard.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}", rpc_timeout=30, _transports=["uv"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, about its own
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


_worlds: list[RpcProcesses] = []


def end_world() -> None:
    """End the world of the groups below, before another begins in this process."""
    while _worlds:
        _worlds.pop().end()


class LocalRpcGroup(RpcGroup):
    """A group in a world that is begun when it is needed: for `WorkerGroupConformance`."""

    def __init__(
        self, factory: Callable[[int], Any], num_workers: int, *, timeout: float = 60.0
    ) -> None:
        if not _worlds or not _worlds[0].complete:
            end_world()
            _worlds.append(RpcProcesses(_NAMES))
        # The group refuses other types.
        names = _NAMES[:num_workers] if isinstance(num_workers, int) else _NAMES
        super().__init__(factory, num_workers, timeout=timeout, names=names)
