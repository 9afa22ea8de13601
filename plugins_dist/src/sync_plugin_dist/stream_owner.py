"""The interface of a sender for its streams, and the sender's state of a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sync_plugin_dist.process_group import TensorGroup
from sync_plugin_dist.rendezvous import Rendezvous
from sync_plugin_std.local import LocalPeer, Message, Publisher, Slot


@dataclass(eq=False)
class DistPeer(LocalPeer):
    """The sender's state of a worker.

    Args:
        served: whether it is served: it has said hello and was not replaced.
        local: whether it reads versions from the sender's memory.
        announced: the newest version announced to it, if it has a stream.
    """

    served: bool = False
    local: bool = False
    announced: int = 0

    @property
    def id(self) -> int:
        """The worker's id, known once it is served."""
        assert self.worker_id is not None
        return self.worker_id


class StreamOwner(ABC):
    """The interface of a sender for its streams."""

    part_nbytes: int
    #: Whether a stream has one process group for several workers.
    collective: bool
    #: How long the members of a process group may take to join, in seconds.
    timeout: float
    #: How long to wait for late workers and for a transfer without progress, in seconds.
    patience: float

    @property
    @abstractmethod
    def publisher(self) -> Publisher:
        """The publisher with the slots and workers."""

    @abstractmethod
    def tell(self, peer: DistPeer, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; return False if the worker is gone."""

    @abstractmethod
    def offer_peer(self, peer: DistPeer) -> None:
        """Offer the worker the newest version, unless it has seen that."""

    @abstractmethod
    def packed(self, slot: Slot) -> int:
        """Return the number of bytes of the slot that can be sent."""

    @abstractmethod
    def sum_of(self, slot: Slot) -> str | None:
        """Return a version's hash; None if it is not packed yet or workers do not verify."""

    @abstractmethod
    def next_number(self) -> int:
        """Return a number for a process group."""

    @abstractmethod
    def open_wire(self, rendezvous: Rendezvous, size: int) -> TensorGroup:
        """Join a process group as the sender; block until the other members have joined."""

    @abstractmethod
    def expected(self) -> set[int]:
        """Return the connected workers without the newest version meant for them."""
