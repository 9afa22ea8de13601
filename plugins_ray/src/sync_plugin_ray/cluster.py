"""Join or start this process's Ray cluster on first use, and leave it after the last."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ray

from sync_core import ClosedError

_DEFAULTS: dict[str, Any] = {
    "logging_level": "warning",
    "include_dashboard": False,
    "log_to_driver": False,
}

# Reentrant, since the garbage collector may call `leave` on a thread that is joining.
_lock = threading.RLock()
_users: dict[tuple[str, str], int] = {}


class Cluster:
    """A use of the Ray cluster by this process, until `leave`.

    If Ray is initialised in this process, that cluster is used. Else this joins the cluster that
    ``RAY_ADDRESS`` names or that runs on this machine, or else starts a local one. The last use to
    end disconnects from a joined cluster and shuts down a started one. Ray that the user
    initialised is not shut down.

    Args:
        init_config: arguments for `ray.init`; ignored if Ray is initialised already.
    """

    def __init__(self, init_config: Mapping[str, Any] | None = None) -> None:
        with _lock:
            if not ray.is_initialized():
                arguments: dict[str, Any] = _DEFAULTS | dict(init_config or {})
                ray.init(**arguments)
                _users[_session_of(ray.get_runtime_context())] = 0
            self._context = ray.get_runtime_context()
            self._session = _session_of(self._context)
            if self._session in _users:
                _users[self._session] += 1
        self._left = False

    @property
    def connected(self) -> bool:
        """Return whether this process is still connected to the same cluster."""
        # After a shutdown, ray.get_runtime_context might start Ray again.
        try:
            return ray.is_initialized() and _session_of(self._context) == self._session
        except (AssertionError, RuntimeError):
            return False  # it was shut down just now

    def check(self) -> None:
        """Raise `ClosedError` if Ray was shut down or initialised again."""
        if not self.connected:
            raise ClosedError("Ray was shut down since this was made; make a new one")

    def leave(self) -> None:
        """End this use of the cluster; a second call does nothing."""
        with _lock:
            if self._left:
                return
            self._left = True
            if self._session not in _users:
                return
            _users[self._session] -= 1
            if not _users[self._session]:
                del _users[self._session]
                self.shut_down()

    def shut_down(self) -> None:
        """Call `ray.shutdown`, even if the user initialised Ray or others use it."""
        with _lock:
            if self.connected:
                ray.shutdown()


def _session_of(context: Any) -> tuple[str, str]:
    # A driver's id is the number of its job, so the first jobs of two clusters have the same id.
    return context.get_node_id(), context.get_worker_id()
