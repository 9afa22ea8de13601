"""A sender's transport on which faults befall the trainer, or workers while it packs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sync_core import Delivery, OptionError, Payload, SenderTransport
from sync_core.testing.faults import process
from sync_core.testing.faults.fault import Fault, InjectedFaultError
from sync_core.testing.faults.gate import gated

FindPid = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Marked:
    """An endpoint, and which version was the newest when it was given to a worker.

    A worker that takes the place of one that was killed must not be killed by the same fault.

    Args:
        endpoint: what the scheme's own transport gave.
        after: the version.
    """

    endpoint: Any
    after: int


class FaultySender(SenderTransport):
    """Passes everything on, but for the faults.

    Args:
        transport: the transport of the scheme; owned from now on.
        faults: those that strike while a version is packed.
        find_pid: the process of a worker.

    Attributes:
        newest: the newest version that was sent.
        missed: the faults of versions that were sent which did not strike.
    """

    def __init__(
        self, transport: SenderTransport, faults: Sequence[Fault], find_pid: FindPid | None
    ) -> None:
        self.newest = 0
        self.missed: list[Fault] = []
        self._transport = transport
        self._faults = list(faults)
        self._find_pid = find_pid

    def address(self, worker_id: int) -> Marked:
        """The scheme's own, marked."""
        return Marked(self._transport.address(worker_id), self.newest)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        """Let the scheme send it."""
        due = [fault for fault in self._faults if fault.version == payload.version]
        self._faults = [fault for fault in self._faults if fault not in due]
        self.missed += due
        self.newest = payload.version
        if due:
            payload = self._gated(payload, due)
        return self._transport.send(payload, worker_ids)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        self._transport.add_worker(worker_id, worker)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        self._transport.remove_worker(worker_id)

    def close(self) -> None:
        """Release everything."""
        self._transport.close()

    def _gated(self, payload: Payload, due: Sequence[Fault]) -> Payload:
        def strike() -> None:
            for fault in due:
                self.missed.remove(fault)
                self._strike(fault)

        tensors = gated(payload.tensors, payload.layout, due[0].at_byte, strike)
        return replace(payload, source=tensors)

    def _strike(self, fault: Fault) -> None:
        if fault.action in ("kill", "stop"):
            for worker_id in fault.worker_ids or ():
                pid = self._pid_of(worker_id)
                if fault.action == "kill":
                    process.kill(pid)
                else:
                    process.stop(pid, fault.seconds)
        elif fault.action == "fork":
            process.fork(fault.seconds)
        elif fault.action == "exec":
            process.execute(fault.seconds)
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        else:
            raise InjectedFaultError(f"while version {fault.version} was packed")

    def _pid_of(self, worker_id: int) -> int:
        if self._find_pid is None:
            raise OptionError(
                "to hurt a worker during the transfer its process must be known: "
                "Faulty(…, find_pid=lambda worker_id: …)"
            )
        return self._find_pid(worker_id)
