"""One other process of the RPC world, as this one sees it."""

from __future__ import annotations

import os
import signal
import weakref
from contextlib import suppress
from io import FileIO

from sync_core.workers import start_process
from sync_plugin_dist.rpc_child import Place

_MAIN = "sync_plugin_dist.rpc_child:main"

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
    """A process that dies with this one.

    Args:
        place: what it is told when it starts.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place.seat.name)
        self._ending = False
        lifeline, write_end = os.pipe()
        self._lifeline = FileIO(write_end, "wb")
        try:
            self._process = start_process(_MAIN, place.to_json(), fds=[lifeline])
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            os.close(lifeline)
        _lifelines.add(self._lifeline)
        # However it is forgotten, and whatever became of the process.
        weakref.finalize(self, self._lifeline.close)

    @property
    def alive(self) -> bool:
        return not self._ending and not self._process.exited(0)

    def epitaph(self) -> str:
        if self._ending:
            return "was stopped"
        if not self.exited(_BURIAL):
            return super().epitaph()
        return self._process.epitaph()

    def ask_to_end(self) -> None:
        """Let the process run its exit handlers and end, whatever it is doing."""
        self._ending = True
        # It is closed where the process has ended.
        with suppress(OSError, ValueError):
            self._lifeline.write(b"\0")

    def terminate(self) -> None:
        """Send SIGTERM, which a stopped process (SIGSTOP) does not feel."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.send_signal(signal.SIGKILL)

    def exited(self, timeout: float) -> bool:
        """Whether the process has ended, at the latest after ``timeout`` seconds."""
        if not self._process.exited(timeout):
            return False
        self._lifeline.close()
        return True


# A process forked from this one must not keep the workers alive after this one has died.
_lifelines: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close_inherited() -> None:
    for inherited in list(_lifelines):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)
