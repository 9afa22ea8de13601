"""A scheme around another one, in which faults befall the versions on their way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sync_core import Address, ReceiverTransport, SenderTransport, TransportContext, hookimpl
from sync_core.plugins import registry
from sync_core.plugins.defaults import Defaults
from sync_core.plugins.hook_check import implemented
from sync_core.plugins.stack import Stack
from sync_core.testing.faults.fault import Fault
from sync_core.testing.faults.receiver import FaultyReceiver, strike
from sync_core.testing.faults.sender import FaultySender, FindPid, Marked


class Faulty:
    """Any scheme, with faults: ``Sender(Faulty("shm", Fault(…)), …)``.

    It pickles with the address, so that the faults of a worker strike in the worker itself. A
    receiver suffers only the faults of versions that were sent after it was given its address, so
    that one that takes the place of another is not hurt by the same fault.

    Args:
        scheme: the name of an installed scheme, or a plugin object.
        *faults: what is to happen.
        find_pid: the process of a worker, for faults that kill or stop it during the transfer;
            it stays in the trainer.

    Example:
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
        # What is amiss around the scheme, it tells by its own name.
        self.capabilities = self._plugin.capabilities - {"findings"}
        # A scheme that loads weights itself goes on doing so, and one that does not must not
        # seem to: the hooks that are there are looked up by name.
        for hook in implemented(self._plugin.object):
            if hook != "create_transport":
                setattr(self, hook, getattr(self._plugin.object, hook))

    def __reduce__(self) -> tuple[Any, ...]:
        return Faulty, (self._scheme, *self._faults)

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The scheme's own transport, in one that has the faults."""
        stack = Stack(Defaults("tensordict"), self._plugin)
        context = replace(context, scheme=self._plugin.name)
        if context.side == "sender":
            return self._create_sender(stack, context)
        after = 0
        if isinstance(context.endpoint, Marked):
            after = context.endpoint.after
            context = replace(context, endpoint=context.endpoint.endpoint)
        faults = [f for f in self._later(after) if f.is_for(context.worker_id)]
        for fault in faults:
            if fault.point == "connect" and fault.version == after + 1:
                strike(fault)
        return FaultyReceiver(stack.create_receiver_transport(context), faults)

    @property
    def missed(self) -> tuple[Fault, ...]:
        """Faults at ``transfer`` that did not strike, though their versions were sent.

        The scheme copied the tensor that has the byte with no function of torch's or numpy's.
        """
        return tuple(fault for sender in self._senders for fault in sender.missed)

    def _create_sender(self, stack: Stack, context: TransportContext) -> FaultySender:
        made: list[FaultySender] = []
        make_address = context.make_address

        def make_marked(**arguments: Any) -> Address:
            # For a scheme that makes the receivers itself, and gives them endpoints of its own.
            assert make_address is not None
            newest = made[0].newest if made else 0
            return replace(
                make_address(**arguments), scheme=Faulty(self._scheme, *self._later(newest))
            )

        context = replace(context, make_address=make_marked)
        transfer = [fault for fault in self._faults if fault.point == "transfer"]
        sender = FaultySender(stack.create_sender_transport(context), transfer, self._find_pid)
        made.append(sender)
        self._senders.append(sender)
        return sender

    def _later(self, after: int) -> list[Fault]:
        return [fault for fault in self._faults if fault.version > after]
