"""Late workers of a sharded trainer: a rank keeps the newest version, and sends them their parts.

Each rank does so without the others. A worker stages what comes, and commits a version once it has
that of all ranks, so it never counts as current with parts of two.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from sync_core import Payload
from sync_core.errors import ClosedError
from sync_core.transports import Block

_log = logging.getLogger("sync_core")
# How long closing waits for a version that is being sent to a late worker, in seconds.
_PATIENCE = 1.0


class LateWorkers:
    """Keeps a copy of the newest version that went to all workers, and has it sent to others.

    The copy takes the memory of the rank's shard once more. A worker may come that wants what no
    other wants, and the trainer changes its model after a send.

    Args:
        send: sends a worker its parts of a version, unless it has them or has not requested any;
            called in the thread ``sync-shards``, with the lock.
        lock: protects the copy.
    """

    def __init__(self, send: Callable[[int, Payload], None], lock: threading.RLock) -> None:
        self._send = send
        self._lock = lock
        self._block: Block | None = None
        self._newest: Payload | None = None
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def keep(self, payload: Payload) -> None:
        """Copy a version over the one before it; it is sent to workers that come from now on.

        Without memory for the copy, there is none, and they wait for the next version.
        """
        with self._lock:
            self._newest = None
            if self._block is None or self._block.nbytes < payload.nbytes:
                self._block = None  # so that there are never two
                try:
                    self._block = Block.allocate(payload.nbytes)
                except (MemoryError, OSError, RuntimeError):
                    _log.warning("no memory to keep version %d for late workers", payload.version)
                    return
            # With its own stopwatch: the payload's is the sender's.
            Payload(payload.version, payload.layout, payload.source).pack(self._block)
            self._newest = Payload(payload.version, payload.layout, self._block)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sync-shards", daemon=True)
                self._thread.start()

    def request(self, worker_id: int) -> None:
        """Have a worker that has requested its parts sent those of the newest version, soon."""
        # Without one, `keep` is followed by a call for each worker that lacks the next one.
        if self._newest is not None:
            self._requests.put(worker_id)

    def close(self) -> None:
        """End the thread."""
        self._requests.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while (worker_id := self._requests.get()) is not None:
            try:
                with self._lock:
                    if self._newest is not None:
                        self._send(worker_id, self._newest)
            except ClosedError:
                return
            except Exception:
                _log.exception("worker %d could not be sent the newest version", worker_id)
