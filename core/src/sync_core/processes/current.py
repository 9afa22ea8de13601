"""The fork server that fits this process as it is now (Linux)."""

from __future__ import annotations

import atexit
import os
import resource
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from sync_core.processes.fork_client import ForkServer
from sync_core.processes.fork_server import Request
from sync_core.processes.forked import ForkedProcess

# Variables that the interpreter or a library reads when it is loaded; all others can be changed
# in a process that runs.
_READ_WHEN_LOADED = (
    *("LD_", "MALLOC_", "GLIBC_", "PYTHON", "TORCH", "PYTORCH", "ATEN_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
)


def fork(request: Request, fds: Sequence[int]) -> ForkedProcess:
    """Have a process forked; see `start_process`."""
    return _current.fork(request, fds)


def fork_server_pids() -> set[int]:
    """The processes of the fork server and of those that it replaced, which are no workers."""
    return _current.pids


class _Current:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._fits: object = None
        self._closed: list[ForkServer] = []

    @property
    def pids(self) -> set[int]:
        current = [] if self._server is None else [self._server]
        return {server.pid for server in [*current, *self._closed]}

    def fork(self, request: Request, fds: Sequence[int]) -> ForkedProcess:
        with self._lock:
            self._closed = [server for server in self._closed if not server.reaped()]
            load, inherited = _to_load(), _inherited()
            try:
                if self._server is not None and self._fits == (load, inherited):
                    # It may have had nothing to do for a while, and ended; the next one does it.
                    with suppress(ConnectionError):
                        return self._server.fork(request, fds)
                self.end()
                self._server, self._fits = ForkServer(load, request.path), (load, inherited)
                return self._server.fork(request, fds)
            except BaseException as error:
                # After Ctrl-C, the next request would read the reply to this one.
                self.end()
                if not isinstance(error, ConnectionError):
                    raise
                raise ChildProcessError(
                    "the process that forks workers ended; what it said is on standard error"
                ) from error

    def end(self) -> None:
        if self._server is not None:
            self._server.close()
            self._closed.append(self._server)
            self._server = None

    def forget(self) -> None:
        """Leave the server to the process that this one was forked from."""
        if self._server is not None:
            self._server.forget()
        self._lock, self._server, self._closed = threading.Lock(), None, []


def _to_load() -> str:
    """What workers need: tensordict too, as slow to load as torch, if this process does."""
    return "sync_core.collector" if "tensordict" in sys.modules else "sync_core"


def _inherited() -> object:
    """What a process has from its parent, and keeps from then on."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(_READ_WHEN_LOADED)}
    limits = [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    ]
    cores = os.sched_getaffinity(0)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    return variables, limits, cores, priority, os.geteuid()


_current = _Current()
atexit.register(_current.end)
os.register_at_fork(after_in_child=_current.forget)
