"""The wrapping scheme of versions that all workers commit or none, and its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from sync_core import OptionError, ReceiverTransport, SenderTransport, TransportContext
from sync_core.checks import check_seconds
from sync_core.errors import AddressError
from sync_core.registry import Plugin
from sync_core.transports import BackgroundReceiver
from sync_core.wrapping import WrappingScheme
from sync_plugin_scale.two_phase.decision import DECISION_LAYOUT

Failed = Literal["abort", "leave_out"]
# The transports of versions and of decisions.
_LANES = 2


@dataclass(frozen=True)
class TwoPhase(WrappingScheme):
    """A scheme whose versions are committed by all workers of a send, or by none.

    Every worker stages a version and says so; then the sender decides, and all commit. The scheme
    has the capability ``all_or_none``: a worker waits for the others. With ``failed="abort"`` it
    has ``aborts``, too: a version that was given up is committed later by no worker.

    Args:
        inner: the scheme that carries versions and decisions.
        failed: what a worker that does not stage a version means for the others. ``"abort"``:
            no worker commits it. ``"leave_out"``: the others commit it, and ``on_failure`` of the
            sender decides about the worker.
        wait: how long a worker keeps a staged version while the sender does not decide, in
            seconds; then it drops it, and keeps the version that it has. None for the timeout of
            the receiver. It should not be shorter than the deadline of a send.

    Raises:
        OptionError: a value that is out of range, or an inner scheme that decides or joins
            versions itself.

    Example:
        >>> import torch
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from sync_core import Receiver, Sender
        >>> policy, models = torch.nn.Linear(4, 2), [torch.nn.Linear(4, 2) for _ in range(2)]
        >>> with Sender("two_phase::thread", policy, num_workers=2) as sender:
        ...     receivers = [Receiver(sender.address(i), models[i]) for i in range(2)]
        ...     pending = sender.send_async()
        ...     with ThreadPoolExecutor() as threads:
        ...         list(threads.map(Receiver.receive, receivers)), pending.wait().updated
        ([1, 1], (0, 1))
    """

    wrapper: ClassVar[str] = "two_phase"
    endpoint_type: ClassVar[type] = list
    keeps: ClassVar[frozenset[str]] = frozenset(
        {"background", "compares", "cross_host", "cross_process", "late_join", "pull"}
    )
    adds: ClassVar[frozenset[str]] = frozenset({"aborts", "all_or_none"})

    failed: Failed = "abort"
    wait: float | None = None

    def __post_init__(self) -> None:
        if self.failed not in get_args(Failed):
            raise OptionError(f"failed must be 'abort' or 'leave_out', got {self.failed!r}")
        if self.wait is not None:
            try:
                check_seconds(self.wait)
            except (TypeError, ValueError) as error:
                raise OptionError(f"wait must be seconds > 0 or None, got {self.wait!r}") from error
            if not self.wait:
                raise OptionError("wait must be seconds > 0 or None, got 0")

    @property
    def capabilities(self) -> frozenset[str]:
        """Return the capabilities of the inner scheme that are kept, and those that are added."""
        return super().capabilities - (frozenset() if self.failed == "abort" else {"aborts"})

    @cached_property
    def plugin(self) -> Plugin:
        """The inner scheme.

        Raises:
            PluginError: it cannot be found or used.
            OptionError: its versions cannot be held back until the sender decides.
        """
        found = super().plugin
        if "joined" in found.capabilities:
            raise OptionError(
                f"{found.describe()} has several senders, each of which would decide alone; its "
                f"workers commit what all senders have sent: type scheme={found.name!r}"
            )
        return refuse_inside(found, self.wrapper)

    def endpoint_to_json(self, endpoint: Any) -> Any:
        """Return the endpoints of both transports as plain values."""
        versions, decisions = endpoint
        return [
            super().endpoint_to_json(versions),
            super(TwoPhase, self._carrier).endpoint_to_json(decisions),
        ]

    def endpoint_from_json(self, value: Any) -> list[Any]:
        """Return the endpoints of both transports."""
        if not isinstance(value, list) or len(value) != _LANES:
            raise AddressError(f"an address of {self.name} must have a list of {_LANES} endpoints")
        return [
            super().endpoint_from_json(value[0]),
            super(TwoPhase, self._carrier).endpoint_from_json(value[1]),
        ]

    def create_sender(self, context: TransportContext) -> SenderTransport:
        """Make the sender's side."""
        from sync_plugin_scale.two_phase.sender import TwoPhaseSender

        if context.workers:
            raise OptionError(
                f"{self.name} needs workers that connect by addresses; give num_workers"
            )
        return TwoPhaseSender(context, self)

    def create_receiver(self, context: TransportContext) -> ReceiverTransport:
        """Make a receiver's side, which stages and waits in the background if asked to."""
        from sync_plugin_scale.two_phase.receiver import TwoPhaseReceiver

        if len(context.endpoint) != _LANES:
            raise AddressError(
                f"the endpoint of an address of scheme {self.name!r} must have {_LANES} parts, got "
                f"{len(context.endpoint)}; type sender.address(worker_id)"
            )
        receiver = TwoPhaseReceiver(replace(context, background=False), self)
        if not context.background:
            return receiver
        receiver.keeps_own_copies = True
        return BackgroundReceiver(receiver)

    def versions_sender(self, context: TransportContext, **changed: Any) -> SenderTransport:
        """Make the sender's side of the transport of versions."""
        return self.inner_sender(context, make_address=None, **changed)

    def decisions_sender(self, context: TransportContext, **changed: Any) -> SenderTransport:
        """Make the sender's side of the transport of decisions."""
        context = replace(_of_decisions(context), models=(), make_address=None)
        return self._carrier.inner_sender(context, **changed)

    def versions_receiver(self, context: TransportContext) -> ReceiverTransport:
        """Make a receiver's side of the transport of versions."""
        return self.inner_receiver(context, endpoint=context.endpoint[0])

    def decisions_receiver(self, context: TransportContext) -> ReceiverTransport:
        """Make a receiver's side of the transport of decisions."""
        context = replace(_of_decisions(context), endpoint=context.endpoint[1])
        return self._carrier.inner_receiver(context)

    @cached_property
    def _carrier(self) -> TwoPhase:
        """The scheme whose inner one carries decisions: what moves bytes, and wraps nothing."""
        moves = self.plugin.innermost
        return TwoPhase(moves.object if moves.distribution is None else moves.name)


def _of_decisions(context: TransportContext) -> TransportContext:
    """Return the context of the transport of decisions, which has another secret."""
    return context.for_channel("decisions", layout=DECISION_LAYOUT, zero_copy=False)


def refuse_inside(found: Plugin, wrapper: str) -> Plugin:
    """Return an inner scheme that does not decide about versions itself.

    Args:
        found: the inner scheme.
        wrapper: the name of the scheme around it.

    Raises:
        OptionError: it is a chain with ``two_phase`` in it.
    """
    if "all_or_none" not in found.capabilities:
        return found
    chain = [name for name in found.name.split("::") if name != TwoPhase.wrapper]
    outside = [] if wrapper == TwoPhase.wrapper else [wrapper]
    remedy = "::".join([TwoPhase.wrapper, *outside, *chain])
    raise OptionError(
        f"{wrapper}::{found.name} would decide about parts of a version, or decide twice; "
        f"two_phase has to be the outermost scheme: type scheme={remedy!r}"
    )
