"""Worlds of torch RPC for tests, one after the other in one process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import rpc

from sync_plugin_dist.rpc_group import RpcGroup
from sync_plugin_dist.rpc_world import initialised

# The private numbers: processes meet under how many worlds each has joined before, and what was
# gathered in worlds of the same names; those of a fresh process and of this one would differ.
_JOIN = """
import os, sys, warnings
import sync_core  # the first call would take as long
from torch.distributed import rpc

name, rank, size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rpc._init_counter = int(sys.argv[5])
options = rpc.TensorPipeRpcBackendOptions(
    init_method=f"file://{store}", rpc_timeout=30, _transports=["uv"]
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
sys.stdin.read()
os._exit(0)
"""


_NAMES = ("worker0", "worker1", "worker2", "worker3")


class RpcProcesses:
    """A world of this process, ``trainer``, and others that end when it does.

    Args:
        names: of the others.
        setup: Python source that they run before they join.
    """

    def __init__(self, names: Sequence[str], setup: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory()
        store, size = str(Path(self._folder.name) / "store"), len(names) + 1
        known = [str(size), store, str(rpc._init_counter)]
        self.processes = {
            name: subprocess.Popen(
                [sys.executable, "-c", setup + _JOIN, name, str(rank), *known],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for rank, name in enumerate(names, 1)
        }
        rpc.api._all_gather_sequence_id.clear()
        # Through shared memory, one that is stopped may keep others from being heard.
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{store}", rpc_timeout=30, _transports=["uv"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's own, about its own
            rpc.init_rpc("trainer", rank=0, world_size=size, rpc_backend_options=options)

    def end(self) -> None:
        """Leave, and end the others."""
        if initialised():
            rpc.shutdown(graceful=False)
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self._folder.cleanup()

    @property
    def complete(self) -> bool:
        """Return whether all of the others live."""
        return all(process.poll() is None for process in self.processes.values())


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
