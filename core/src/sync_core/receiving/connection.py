"""The state of one connection of a receiver to its sender, and the end of a connection."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

from torch import Tensor

from sync_core.address import Address
from sync_core.receiving.target import LentPayload, Target
from sync_core.transports.transport import Answer, ReceiverTransport
from sync_core.weights.payload import Payload


class Connection:
    """The state of one connection, which a receiver replaces as a whole when it connects again.

    Args:
        owner: the receiver; the connection ends when it is forgotten.
        target: the model, with the address to connect to.
        timeout: in seconds.
        version: the version that the model has.
        extras: those of that version.
        background: see `sync_core.Receiver`.
    """

    def __init__(
        self,
        owner: object,
        target: Target,
        timeout: float,
        version: int,
        extras: Mapping[str, Tensor],
        *,
        background: bool,
    ) -> None:
        self.target = target
        self.version = version
        self.extras = extras
        #: The version that has come and is not committed yet.
        self.staged: Payload | None = None
        #: When the staged version was written into the model, by `time.perf_counter`.
        self.load_began = self.load_ended = 0.0
        #: The target of the next connection, where another model was registered.
        self.successor: Target | None = None
        self.transport = target.connect(timeout, background=background)
        reason = "dropped its receiver without closing it"
        self._leave: weakref.finalize[..., Any] = weakref.finalize(
            owner, _leave, self.transport, target.lease, os.getpid(), reason
        )
        self._leave.atexit = False

    def end(self, reason: str) -> None:
        """Release what is staged, notify the sender, and close; ending again is allowed."""
        payload, self.staged = self.staged, None
        if payload is not None:
            payload.release()
        if ending := self._leave.detach():
            transport, lease, process, _ = ending[2]
            _leave(transport, lease, process, reason)


def _leave(transport: ReceiverTransport, lease: LentPayload, process: int, reason: str) -> None:
    lease.end()
    try:
        # Not for a process that was forked from the receiver's.
        if os.getpid() == process:
            transport.leave(reason)
    finally:
        transport.close()


def refuse(address: Address, timeout: float, error: Exception) -> None:
    """Connect only to let the sender know, at once, why this worker cannot receive."""
    # The caller gets the reason, and not that the sender could not be reached.
    with suppress(Exception), closing(address.connect(timeout)) as transport:
        payload = transport.receive(0.0)
        if payload is not None:
            payload.release()
            transport.acknowledge(Answer.refusal(payload.version, error))
        transport.leave(f"refused to receive: {type(error).__name__}: {error}")
