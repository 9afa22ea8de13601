"""A transport that sends a version in chunks, each of which is a version of the scheme's own.

A worker answers each chunk when it has copied it, and the last one when it has committed the
version. There are two transports, which take turns, so that one chunk is on its way while the one
before it is answered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from sync_core import OptionError, ReceiverTransport, SenderTransport, TransportContext
from sync_core.errors import AddressError
from sync_core.registry import Plugin
from sync_core.transports import BackgroundReceiver
from sync_core.wrapping import WrappingScheme
from sync_plugin_scale.relays.version import LANES
from sync_plugin_scale.two_phase.scheme import refuse_inside


@dataclass(frozen=True)
class Chunked(WrappingScheme):
    """A scheme whose versions travel in chunks over another scheme, which relays can pass on.

    While one chunk is on its way, the one before it is answered: see `Relay`.

    Args:
        inner: the scheme that carries the chunks.
        mb: the size of a chunk, in MB (1e6 bytes).

    Raises:
        OptionError: the size is not one, or nothing travels by the inner scheme.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender
        >>> policy, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Sender(Chunked("thread", mb=1), policy, num_workers=1) as sender:
        ...     pending = sender.send_async()
        ...     Receiver(sender.address(0), model).receive(), pending.wait().updated
        (1, (0,))
    """

    wrapper: ClassVar[str] = "chunked"
    endpoint_type: ClassVar[type] = list
    keeps: ClassVar[frozenset[str]] = frozenset(
        {"background", "cross_host", "cross_process", "late_join", "pull"}
    )

    mb: float = 4.0

    def __post_init__(self) -> None:
        number = isinstance(self.mb, int | float) and not isinstance(self.mb, bool)
        if not number or not 0 < self.mb < math.inf:
            raise OptionError(f"mb must be a size in MB, such as 4, got {self.mb!r}")

    @cached_property
    def plugin(self) -> Plugin:
        """The inner scheme.

        Raises:
            PluginError: it cannot be found or used.
            OptionError: it decides about each chunk.
        """
        return refuse_inside(super().plugin, self.wrapper)

    @property
    def nbytes(self) -> int:
        """The size of a chunk in bytes."""
        return max(1, int(self.mb * 1e6))

    def endpoint_to_json(self, endpoint: Any) -> Any:
        """Return the endpoints of both transports as plain values."""
        return [super(Chunked, self).endpoint_to_json(each) for each in endpoint]

    def endpoint_from_json(self, value: Any) -> list[Any]:
        """Return the endpoints of both transports."""
        if not isinstance(value, list) or len(value) != LANES:
            raise AddressError(f"an address of {self.name} must have a list of {LANES} endpoints")
        return [super(Chunked, self).endpoint_from_json(each) for each in value]

    def create_sender(self, context: TransportContext) -> SenderTransport:
        """Make the sender's side."""
        from sync_plugin_scale.relays.sender import ChunkedSender

        if context.workers:
            raise OptionError(
                f"{self.name} needs workers that connect by addresses; give num_workers"
            )
        if "slots" in context.options:
            raise OptionError(
                f"slots= cannot be given with {self.name}, since each worker's chunk takes a slot "
                "of its own, which has the size of a chunk; leave slots= out"
            )
        return ChunkedSender(context, self)

    def create_receiver(self, context: TransportContext) -> ReceiverTransport:
        """Make a receiver's side, which puts versions together in the background if asked to."""
        from sync_plugin_scale.relays.receiver import ChunkedReceiver

        receiver = ChunkedReceiver(replace(context, background=False), self)
        return BackgroundReceiver(receiver) if context.background else receiver
