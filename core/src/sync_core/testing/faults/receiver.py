"""A receiver's transport on which faults befall the worker and what it is given."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sync_core import Answer, Block, Layout, Payload, ReceiverTransport
from sync_core.testing.faults import process
from sync_core.testing.faults.fault import Fault, InjectedFaultError
from sync_core.testing.faults.gate import gated


def strike(fault: Fault) -> None:
    """Do to this process what a fault says."""
    if fault.action == "kill":
        process.kill(os.getpid())
    elif fault.action == "stop":
        process.stop(os.getpid(), fault.seconds)
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "raise":
        raise InjectedFaultError(f"at {fault.point!r} of version {fault.version}")


class FaultyReceiver(ReceiverTransport):
    """Passes everything on, but for the faults.

    Args:
        transport: the transport of the scheme; owned from now on.
        faults: those that this worker is still to suffer.
    """

    def __init__(self, transport: ReceiverTransport, faults: Sequence[Fault]) -> None:
        self._transport = transport
        self._faults = list(faults)
        self._done = 0
        self._again: deque[Payload] = deque()

    def receive(self, timeout: float) -> Payload | None:
        """What the scheme has received, unless that is lost."""
        deadline = time.monotonic() + timeout
        for fault in self._due("receive", self._done + 1):
            strike(fault)
        if self._again:
            return self._again.popleft()
        while True:
            payload = self._receive(max(0.0, deadline - time.monotonic()))
            if payload is None:
                return None
            kept = self._stage(payload)
            if kept is not None or time.monotonic() > deadline:
                return kept

    def acknowledge(self, answer: Answer) -> None:
        """Answer, unless the answer is lost."""
        times, self._done = 1, answer.version
        for fault in self._due("acknowledge", answer.version):
            strike(fault)
            times = {"drop": 0, "duplicate": 2}.get(fault.action, times)
        for _ in range(times):
            self._transport.acknowledge(answer)

    def on_arrival(self, callback: Callable[[], None]) -> bool:
        """Have a function called when the scheme has it called."""
        return self._transport.on_arrival(callback)

    def leave(self, reason: str) -> None:
        """Notify the sender."""
        self._transport.leave(reason)

    def wake(self) -> None:
        """Let whoever waits come back."""
        self._transport.wake()

    def close(self) -> None:
        """Release what was to come again, too."""
        self._again.clear()
        self._transport.close()

    def _receive(self, timeout: float) -> Payload | None:
        try:
            return self._transport.receive(timeout)
        except Exception:
            # There was a version, which the transport itself has refused.
            self._done += 1
            raise

    def _stage(self, payload: Payload) -> Payload | None:
        for fault in self._due("staged", payload.version):
            try:
                strike(fault)
            except InjectedFaultError:
                self._lose(payload)
                raise
            if fault.action == "drop":
                self._lose(payload)
                return None
            if fault.action == "duplicate":
                self._again.append(_copy(payload))
            elif fault.action == "corrupt":
                payload = _corrupted(payload, fault.at_byte)
            elif fault.action == "misname":
                payload = _misnamed(payload)
        for fault in self._due("commit", payload.version):
            payload = _gated(payload, fault.at_byte, partial(strike, fault))
        return payload

    def _lose(self, payload: Payload) -> None:
        payload.release()
        self._done = payload.version

    def _due(self, point: str, version: int) -> list[Fault]:
        due = [f for f in self._faults if f.point == point and f.version == version]
        self._faults = [fault for fault in self._faults if fault not in due]
        return due


def _copy(payload: Payload, release: Callable[[], None] = lambda: None) -> Payload:
    block = Block.allocate(payload.nbytes)
    payload.pack(block)
    return replace(payload, source=block, release=release)


def _corrupted(payload: Payload, at_byte: int) -> Payload:
    copy = _copy(payload, payload.release)
    assert isinstance(copy.source, Block)
    copy.source.memory[len(copy.layout.header) + at_byte] ^= 1
    return copy


def _misnamed(payload: Payload) -> Payload:
    specs = zip(payload.layout.specs, payload.tensors, strict=True)
    layout = Layout.of({f"{spec.name}?": tensor for spec, tensor in specs})
    return replace(payload, layout=layout, source=payload.tensors)


def _gated(payload: Payload, at_byte: int, gate: Callable[[], object]) -> Payload:
    tensors = gated(payload.tensors, payload.layout, at_byte, gate)
    return replace(payload, source=tensors)
