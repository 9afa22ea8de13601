"""A worker's process as a fork of the fork server, which alone can wait for it."""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from contextlib import suppress

from sync_core.processes.worker_process import WorkerProcess


class ForkedProcess(WorkerProcess):
    """A process forked by the server.

    Args:
        pid: its id.
        process: a descriptor of the process (pidfd), owned from now on.
        status: a descriptor from which its exit code can be read when it has ended, owned too.
    """

    def __init__(self, pid: int, process: int, status: int) -> None:
        self.pid = pid
        self._process = process
        self._status = status
        self._code: int | None = None
        self._ended = False
        # How many threads wait: a descriptor that one of them uses must not be closed.
        self._waiting = 0
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close, process, status)

    @property
    def returncode(self) -> int | None:
        self.exited(0)
        return self._code

    def exited(self, timeout: float) -> bool:
        with self._lock:
            if self._ended:
                return True
            self._waiting += 1
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        try:
            found = bool(ended.poll(max(0.0, timeout) * 1000))
        finally:
            with self._lock:
                self._waiting -= 1
        return found and self._end()

    def send_signal(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._ended:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, number)

    def _end(self) -> bool:
        with self._lock:
            if not self._ended:
                # Empty when the server has died: nobody knows then.
                code = os.read(self._status, 16)
                self._code = int(code) if code else None
                self._ended = True
            if not self._waiting:
                self._close()
        return True


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
