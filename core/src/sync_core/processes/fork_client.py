"""The fork server, seen from the process that started it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from sync_core.processes.fork_server import Request, receive_reply, send_request
from sync_core.processes.forked import ForkedProcess

# No garbage is looked for while torch is loaded: a quarter of the time that this takes.
_BOOT = (
    "import gc, sys; gc.disable(); "
    "control, load = int(sys.argv[1]), sys.argv[2]; sys.path[:] = sys.argv[3:]; del sys.argv[1:]; "
    "from sync_core.processes.fork_server import main; main(control, load)"
)

# Loading torch takes seconds, and the machine may be busy.
_PATIENCE = 120.0


class ForkServer:
    """A server of this process's own, which ends with it, or when it has nothing to do.

    Args:
        load: the module that it imports before it forks.
        path: its ``sys.path``.
    """

    def __init__(self, load: str, path: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_PATIENCE)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), load, *path],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                ],
                # Ctrl-C is for this process, and the other one cannot ignore it at once.
                setsigmask=[signal.SIGINT],
            )

    def fork(self, request: Request, fds: Sequence[int]) -> ForkedProcess:
        """Have a process forked.

        Raises:
            ConnectionError: the server has ended.
        """
        with ExitStack() as opened:
            given = [_copy(1), _copy(2), os.open(".", os.O_RDONLY | os.O_DIRECTORY)]
            for descriptor in given:
                opened.callback(os.close, descriptor)
            try:
                send_request(self._control, request, [*given, *fds])
                return ForkedProcess(*receive_reply(self._control))
            except TimeoutError as error:
                raise ConnectionError(f"no answer within {_PATIENCE:g} s") from error

    def close(self) -> None:
        """Let it end as soon as nothing lives that it has forked."""
        self._control.close()

    def reaped(self) -> bool:
        """Whether it has ended, and is not a zombie either."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            # Somebody who waits for any child was told.
            return True

    def forget(self) -> None:
        """In a process forked from this one: hold nothing of the server."""
        self._control.close()


def _copy(standard: int) -> int:
    try:
        return os.dup(standard)
    except OSError:
        # A process may have closed its standard output.
        return os.open(os.devnull, os.O_WRONLY)
