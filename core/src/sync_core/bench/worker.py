"""What a benchmark's worker does: receives, checks what arrived, and measures plain copies."""

from __future__ import annotations

import mmap
import os
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from sync_core.bench.models import is_marked, make_model
from sync_core.errors import SenderLostError
from sync_core.plugins.address import Address
from sync_core.receiving.receiver import Receiver
from sync_core.weights import pages

_LONG = 3600.0


class BenchWorker:
    """Hosted by each worker of a benchmark.

    Args:
        model: the name of the model.
    """

    def __init__(self, model: str) -> None:
        self.model = make_model(model)
        self._receiver: Receiver | None = None
        self._source: np.ndarray[Any, Any] | None = None
        self._target: np.ndarray[Any, Any] | None = None

    def connect(self, address: Address) -> None:
        """Connect to the sender."""
        self._receiver = Receiver(address, self.model)

    def receive(self) -> int | None:
        """Wait for a version and commit it."""
        return self._connected().receive()

    def keep_receiving(self) -> None:
        """Commit every version that comes from now on, in a thread that ends with the sender."""
        receiver = self._connected()
        threading.Thread(
            target=_receive_all, args=(receiver,), name="sync-bench", daemon=True
        ).start()

    def has_arrived(self, version: int) -> bool:
        """Whether every element of the model is of this version."""
        return is_marked(self.model, version)

    def map_source(self, path: str, nbytes: int) -> None:
        """Map the memory that `copy_source` reads, and touch what it writes to."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapping = mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._source = np.frombuffer(mapping, dtype=np.uint8)
        # On a page of its own like the source: elsewhere in the page it may take several times
        # as long, and this is to be the limit.
        self._target = np.frombuffer(pages.allocate(nbytes), dtype=np.uint8)
        self._target[:] = 0

    def copy_source(self) -> tuple[float, float]:
        """Copy the whole source once; when that began and ended."""
        if self._source is None or self._target is None:
            raise RuntimeError("map_source comes before copy_source")
        begin = time.perf_counter()
        np.copyto(self._target, self._source)
        return begin, time.perf_counter()

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise RuntimeError("connect comes before receive")
        return self._receiver


def _receive_all(receiver: Receiver) -> None:
    with suppress(SenderLostError):
        while True:
            receiver.receive(timeout=_LONG)
