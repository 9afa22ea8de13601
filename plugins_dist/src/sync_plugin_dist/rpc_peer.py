"""One other process of the RPC world, as this one sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

from sync_plugin_dist.rpc_child import Place

# `-m` would import from the current directory first, and could not find a package that only this
# process's sys.path leads to.
_BOOT = (
    "import sys; place = sys.argv[1]; sys.path[:] = sys.argv[2:]; del sys.argv[1:]; "
    "from sync_plugin_dist.rpc_child import main; main(place)"
)

# From the end of its connection to the end of a process: closing a GPU takes a moment.
_BURIAL = 5.0


class Peer:
    """A process that somebody else has started.

    Args:
        name: its name in the RPC world.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def alive(self) -> bool:
        """Whether the process lives, as far as this one can tell without asking it."""
        return True

    def epitaph(self) -> str:
        """What became of it, now that it cannot be reached any more."""
        return f"RPC has lost {self.name!r}"


class ChildPeer(Peer):
    """A fresh interpreter, which dies with this process.

    Args:
        place: what it is told when it starts; the lifeline is made here.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place.seat.name)
        self._ending = False
        lifeline, write_end = os.pipe()
        self._lifeline = FileIO(write_end, "wb")
        try:
            self._process = _spawn(replace(place, lifeline=lifeline))
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            os.close(lifeline)
        _lifelines.add(self._lifeline)

    @property
    def alive(self) -> bool:
        return not self._ending and self._process.poll() is None

    def epitaph(self) -> str:
        if self._ending:
            return "was stopped"
        if not self.exited(_BURIAL):
            return super().epitaph()
        code = self._process.returncode
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def ask_to_end(self) -> None:
        """Let the process run its exit handlers and end, whatever it is doing."""
        self._ending = True
        # It is closed where the process has ended.
        with suppress(OSError, ValueError):
            self._lifeline.write(b"\0")

    def terminate(self) -> None:
        """Send SIGTERM, which a stopped process (SIGSTOP) does not feel."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def exited(self, timeout: float) -> bool:
        """Whether the process has ended, at the latest after ``timeout`` seconds; reaps it."""
        try:
            self._process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            return False
        self._lifeline.close()
        return True


def _spawn(place: Place) -> subprocess.Popen[bytes]:
    path = [str(Path(entry).absolute()) for entry in sys.path]
    command = [sys.executable, "-c", _BOOT, place.to_json(), *path]
    # Blocked, and inherited so, until the child ignores it: Ctrl-C is for the parent to act on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[place.lifeline])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# A process forked from this one must not keep the workers alive after this one has died.
_lifelines: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close_inherited() -> None:
    for inherited in list(_lifelines):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)
