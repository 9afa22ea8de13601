"""The limit of this machine: one pack, and one copy for each worker, and nothing else."""

from __future__ import annotations

import mmap
import os
import sys
import time
from types import TracebackType
from typing import Self

import torch

from sync_core.bench.worker import BenchWorker
from sync_core.weights.block import Block
from sync_core.weights.payload import Payload
from sync_core.weights.update import Update
from sync_core.workers.worker_group import WorkerGroup


class CopyLimit:
    """Measures the copies that no scheme between processes can do without.

    The trainer's tensors are packed into one mapping, all of whose pages are there; then every
    worker copies the mapping, at once with the others, into one block of its own.

    Args:
        group: the workers, which host a `BenchWorker`.
        update: the weights.
    """

    def __init__(self, group: WorkerGroup, update: Update) -> None:
        self._group = group
        self._payload = Payload(0, update.layout, update.source)
        nbytes = self._payload.nbytes
        self._descriptor = os.memfd_create("sync-core-bench")
        os.ftruncate(self._descriptor, nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapping = mmap.mmap(self._descriptor, nbytes, flags=flags)
        self._block = Block(torch.frombuffer(mapping, dtype=torch.uint8))
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        for call in [group.call(i, BenchWorker.map_source, path, nbytes) for i in group.worker_ids]:
            call.result()

    @staticmethod
    def is_available() -> bool:
        """Whether this system has what it takes."""
        return sys.platform == "linux"

    def measure(self) -> float:
        """Seconds for one pack and for the workers' copies, the calls to them left out."""
        begin = time.perf_counter()
        self._payload.pack(self._block)
        pack = time.perf_counter() - begin
        calls = [self._group.call(i, BenchWorker.copy_source) for i in self._group.worker_ids]
        spans = [call.result() for call in calls]
        return pack + max(end for _, end in spans) - min(begin for begin, _ in spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)
