"""A scheme whose transports fail at points that a test chooses."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sync_core import (
    Address,
    Answer,
    Delivery,
    Layout,
    OptionError,
    Payload,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
    hookimpl,
    registry,
)
from sync_core.hooks import implemented
from sync_core.transports import Block
from sync_core.wrapping import make_receiver, make_sender
from sync_testing.faults import process
from sync_testing.faults.fault import Fault, InjectedFaultError, gated


def strike(fault: Fault) -> None:
    """Perform the action of a fault in this process."""
    if fault.action == "kill":
        process.kill(os.getpid())
    elif fault.action == "stop":
        process.stop(os.getpid(), fault.seconds)
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "raise":
        raise InjectedFaultError(f"at {fault.point!r} of version {fault.version}")


class FaultyReceiver(ReceiverTransport):
    """Wraps a receiver transport, and injects faults.

    Args:
        transport: the scheme's transport; this object closes it.
        faults: the remaining faults of this worker.
    """

    def __init__(self, transport: ReceiverTransport, faults: Sequence[Fault]) -> None:
        self._transport = transport
        self._faults = list(faults)
        self._done = 0
        self._again: deque[Payload] = deque()

    def receive(self, timeout: float) -> Payload | None:
        """Return the received payload, unless a fault drops it."""
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
        """Acknowledge, unless a fault drops the answer."""
        times, self._done = 1, answer.version
        for fault in self._due("acknowledge", answer.version):
            strike(fault)
            times = {"drop": 0, "duplicate": 2}.get(fault.action, times)
        for _ in range(times):
            self._transport.acknowledge(answer)

    def on_arrival(self, callback: Callable[[], None]) -> bool:
        """Register a function with the scheme's transport."""
        return self._transport.on_arrival(callback)

    def leave(self, reason: str) -> None:
        """Notify the sender."""
        self._transport.leave(reason)

    def wake(self) -> None:
        """Wake waiting threads."""
        self._transport.wake()

    def close(self) -> None:
        """Also release payloads that were to be delivered twice."""
        self._again.clear()
        self._transport.close()

    def _receive(self, timeout: float) -> Payload | None:
        try:
            return self._transport.receive(timeout)
        except Exception:
            # A version arrived, which the transport itself has refused.
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
    # The names of extras identify them, so they are kept.
    weights = payload.layout.plain.specs
    extras = payload.layout.specs[len(weights) :]
    kinds = [(f"{spec.name}?", spec.dtype, spec.shape) for spec in weights]
    layout = Layout.of_kinds(kinds + [(spec.name, spec.dtype, spec.shape) for spec in extras])
    return replace(payload, layout=layout, source=payload.tensors)


def _gated(payload: Payload, at_byte: int, gate: Callable[[], object]) -> Payload:
    tensors = gated(payload.tensors, payload.layout, at_byte, gate)
    return replace(payload, source=tensors)


FindPid = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Marked:
    """An endpoint, with the newest version when a worker got it.

    So the fault that killed a worker does not also kill its replacement.

    Args:
        endpoint: the endpoint from the scheme's transport.
        after: the newest version at that time.
    """

    endpoint: Any
    after: int


class FaultySender(SenderTransport):
    """Wraps a sender transport, and injects faults.

    Args:
        transport: the scheme's transport; this object closes it.
        faults: the faults that happen while a version is packed.
        find_pid: returns the process id of a worker.

    Attributes:
        newest: the newest version that was sent.
        missed: the faults of sent versions that did not happen.
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
        """Return the scheme's endpoint, marked with the newest version."""
        return Marked(self._transport.address(worker_id), self.newest)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        """Send by the scheme."""
        due = [fault for fault in self._faults if fault.version == payload.version]
        self._faults = [fault for fault in self._faults if fault not in due]
        self.missed += due
        self.newest = payload.version
        if due:
            payload = self._gated(payload, due)
        return self._transport.send(payload, worker_ids)

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Wait as the scheme does."""
        self._transport.wait(deliveries, timeout)

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


class Faulty:
    """Any scheme with injected faults: ``Sender(Faulty("shm", Fault(…)), …)``.

    It is pickled with the address, so a worker's faults happen in the worker itself. A receiver has
    only the faults of versions sent after it got its address, so a replacement does not repeat the
    faults of its predecessor.

    Args:
        scheme: the name of an installed scheme, or a plugin object.
        *faults: the faults.
        find_pid: returns the process id of a worker, for faults that kill or stop it during the
            transfer; used only in the trainer.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender, SendError
        >>> policy, copy = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> scheme = Faulty("thread", Fault(action="drop", point="acknowledge", version=1))
        >>> with Sender(scheme, policy, num_workers=1) as sender:
        ...     receiver = Receiver(sender.address(0), copy)
        ...     pending = sender.send_async()
        ...     version = receiver.receive()
        ...     try:
        ...         pending.wait(timeout=0.1)
        ...     except SendError as error:
        ...         print(type(error.report.workers[0].error).__name__)
        WorkerTimeoutError
        >>> version, torch.equal(policy.weight, copy.weight)
        (1, True)
    """

    def __init__(self, scheme: Any, *faults: Fault, find_pid: FindPid | None = None) -> None:
        self._scheme = scheme
        self._faults = faults
        self._find_pid = find_pid
        self._senders: list[FaultySender] = []
        self._plugin = registry.find(registry.SCHEMES, scheme)
        self.capabilities = self._plugin.capabilities
        # Hooks are looked up by name, so this object must have exactly the hooks of the scheme,
        # such as those for loading weights.
        for hook in implemented(self._plugin.object):
            if hook != "create_transport":
                setattr(self, hook, getattr(self._plugin.object, hook))

    def __reduce__(self) -> tuple[Any, ...]:
        return Faulty, (self._scheme, *self._faults)

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """Return the scheme's transport, wrapped in one with the faults."""
        if context.side == "sender":
            return self._create_sender(context)
        after = 0
        if isinstance(context.endpoint, Marked):
            after = context.endpoint.after
            context = replace(context, endpoint=context.endpoint.endpoint)
        faults = [f for f in self._later(after) if f.is_for(context.worker_id)]
        for fault in faults:
            if fault.point == "connect" and fault.version == after + 1:
                strike(fault)
        return FaultyReceiver(make_receiver(self._plugin, context), faults)

    @property
    def missed(self) -> tuple[Fault, ...]:
        """The faults at ``transfer`` that did not happen, although their versions were sent.

        A fault is missed if the scheme copies the tensor without a function of torch or numpy.
        """
        return tuple(fault for sender in self._senders for fault in sender.missed)

    def _create_sender(self, context: TransportContext) -> FaultySender:
        made: list[FaultySender] = []
        make_address: Callable[..., Address] | None = context.make_address

        def make_marked(**arguments: Any) -> Address:
            # For a scheme that makes receivers itself, and passes endpoints to them.
            assert make_address is not None
            newest = made[0].newest if made else 0
            return replace(
                make_address(**arguments), scheme=Faulty(self._scheme, *self._later(newest))
            )

        context = replace(context, make_address=make_marked)
        transfer = [fault for fault in self._faults if fault.point == "transfer"]
        sender = FaultySender(make_sender(self._plugin, context), transfer, self._find_pid)
        made.append(sender)
        self._senders.append(sender)
        return sender

    def _later(self, after: int) -> list[Fault]:
        return [fault for fault in self._faults if fault.version > after]
