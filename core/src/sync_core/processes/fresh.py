"""A worker's process as a fresh interpreter, for systems where one with torch cannot be forked."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sync_core.processes.worker_process import WorkerProcess

# `-m` would import from the current directory first, and could not find a package that only this
# process's sys.path leads to.
_BOOT = (
    "import sys; main, fds, args = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]); "
    "given, sys.path[:] = sys.argv[4:4 + fds + args], sys.argv[4 + fds + args:]; "
    "del sys.argv[1:]; from sync_core.processes.program import run; "
    "run(main, [*map(int, given[:fds]), *given[fds:]])"
)


def absolute_path() -> list[str]:
    """``sys.path`` such that it means the same in another directory."""
    return [str(Path(entry).absolute()) for entry in sys.path]


class FreshProcess(WorkerProcess):
    """A fresh interpreter; see `start_process` for the arguments."""

    def __init__(self, main: str, args: Sequence[str], fds: Sequence[int]) -> None:
        counts = [str(len(fds)), str(len(args))]
        given = [*map(str, fds), *args]
        command = [sys.executable, "-c", _BOOT, main, *counts, *given, *absolute_path()]
        # Blocked, and inherited so, until the child ignores it: Ctrl-C is for the parent.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def exited(self, timeout: float) -> bool:
        try:
            self._process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            return False
        return True

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
