"""The Ray cluster of this process: joined or started when first needed, left by the last user."""

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

# Reentrant, as the garbage collector may make this very thread leave while it joins.
_lock = threading.RLock()
_users: dict[tuple[str, str], int] = {}


class Cluster:
    """This process's part in a cluster, until `leave`.

    If Ray is running in this process, that is used; else one that runs on this machine, or that
    ``RAY_ADDRESS`` names; else a local one is started. A cluster begun here ends here: the last to
    leave disconnects from a cluster that was joined, and shuts down one that was started. Ray that
    the user initialised is left alone.

    Args:
        init_config: arguments for `ray.init`; ignored where Ray is initialised already.
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
        """Return whether Ray still is what it was when this was made."""
        # Asking ray.get_runtime_context, when Ray is shut down, might start it again.
        try:
            return ray.is_initialized() and _session_of(self._context) == self._session
        except (AssertionError, RuntimeError):
            return False  # it was shut down just now

    def check(self) -> None:
        """Raise `ClosedError` when Ray was shut down meanwhile, or initialised again."""
        if not self.connected:
            raise ClosedError("Ray was shut down since this was made; make a new one")

    def leave(self) -> None:
        """Use the cluster no longer; doing so again does nothing."""
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
        """Call `ray.shutdown`, even where Ray was not begun here, or others use it."""
        with _lock:
            if self.connected:
                ray.shutdown()


def _session_of(context: Any) -> tuple[str, str]:
    # A driver's id counts the jobs of its cluster, so the first job of every new one has the same.
    return context.get_node_id(), context.get_worker_id()
