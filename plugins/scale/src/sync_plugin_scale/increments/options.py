"""The wrapping scheme of incremental versions, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from sync_core import OptionError, ReceiverTransport, SenderTransport, TransportContext
from sync_core.registry import Plugin
from sync_core.wrapping import WrappingScheme
from sync_plugin_scale.increments.patch import Compression, zstd
from sync_plugin_scale.two_phase.scheme import refuse_inside


@dataclass(frozen=True)
class Increments(WrappingScheme):
    """A scheme that sends each worker what it lacks: positions that changed, and their values.

    A whole version travels where that takes fewer bytes, and to workers that have none. For
    workers on other machines, and for stores. Sender and workers each keep one more copy of the
    model in memory.

    Args:
        inner: the scheme that carries the increments.
        below: an increment travels where it takes less than this share of a whole version's bytes.
        whole_every: send a whole version to every worker after so many versions; None for never.
        compress: ``"zstd"`` compresses increments; needs
            ``pip install "sync-plugin-scale[zstd]"``, here and in the workers.

    Raises:
        OptionError: a value that is out of range, zstandard is missing, or the inner scheme does
            not leave the process.

    Example:
        >>> Increments("dist", below=2)
        Traceback (most recent call last):
        ...
        sync_core.errors.OptionError: below must be a number between 0 and 1, got 2
    """

    wrapper: ClassVar[str] = "increments"
    keeps: ClassVar[frozenset[str]] = frozenset(
        {"background", "broadcast", "cross_host", "cross_process", "late_join", "pull"}
        | {"descriptors", "worker_paths"}
    )
    adds: ClassVar[frozenset[str]] = frozenset({"compares"})

    below: float = 0.3
    whole_every: int | None = None
    compress: Compression | None = None

    def __post_init__(self) -> None:
        if isinstance(self.below, bool) or not isinstance(self.below, int | float):
            raise OptionError(f"below must be a number between 0 and 1, got {self.below!r}")
        if not 0 < self.below <= 1:
            raise OptionError(f"below must be a number between 0 and 1, got {self.below!r}")
        every = self.whole_every
        if every is not None and (type(every) is not int or every < 1):
            raise OptionError(f"whole_every must be an integer >= 1 or None, got {every!r}")
        if self.compress not in (None, "zstd"):
            raise OptionError(f"compress must be 'zstd' or None, got {self.compress!r}")
        if self.compress is not None:
            zstd()

    @cached_property
    def plugin(self) -> Plugin:
        """The inner scheme.

        Raises:
            PluginError: it cannot be found or used.
            OptionError: increments would save nothing over it.
        """
        found = super().plugin
        if self.adds <= found.capabilities:
            raise OptionError(
                f"{found.describe()} leaves out already what a worker has; type "
                f"scheme={found.name!r}"
            )
        if "cross_process" not in found.capabilities:
            raise OptionError(
                f"{found.describe()} does not leave this process (it does not declare the "
                "capability 'cross_process'), where comparing two versions costs more than copying "
                f"one; type scheme={found.name!r}"
            )
        return refuse_inside(found, self.wrapper)

    def create_sender(self, context: TransportContext) -> SenderTransport:
        """Make the sender's side."""
        from sync_plugin_scale.increments.sender import IncrementalSender

        return IncrementalSender(context, self)

    def create_receiver(self, context: TransportContext) -> ReceiverTransport:
        """Make a receiver's side."""
        from sync_plugin_scale.increments.receiver import IncrementalReceiver

        return IncrementalReceiver(self.inner_receiver(context), context.worker_id)
