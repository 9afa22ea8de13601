"""A process that a worker runs in, seen from the process that asked for it."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod


class WorkerProcess(ABC):
    """A process started by `start_process`.

    Attributes:
        pid: its id.
    """

    pid: int

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that killed it; None while it runs, or if unknown."""

    @abstractmethod
    def exited(self, timeout: float) -> bool:
        """Whether it has ended, at the latest after ``timeout`` seconds."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens when it has ended."""

    def epitaph(self) -> str:
        """How it has ended, for messages."""
        code = self.returncode
        if code is None:
            return "has ended"
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
