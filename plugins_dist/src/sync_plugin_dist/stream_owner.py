"""The interface of the sender to its streams, and its view of a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from sync_core.transports import Message, Peer, Publisher, Slot
from sync_plugin_dist.process_group import TensorGroup
from sync_plugin_dist.rendezvous import Rendezvous


@dataclass(eq=False)
class DistPeer(Peer):
    """A worker.

    Args:
        served: whether it has a stream: its hello has arrived, and it was not replaced.
        offered: the newest version that was announced to it.
        knows: the slots that it has mapped, on this machine.
        waits: whether, on this machine, it is shown a version as soon as there is one.
    """

    served: bool = False
    offered: int = 0
    knows: set[int] = field(default_factory=set)
    waits: bool = False

    @property
    def id(self) -> int:
        """Its worker's id, which is known once it is served."""
        assert self.worker_id is not None
        return self.worker_id


class StreamOwner(ABC):
    """A sender, to its lanes."""

    publisher: Publisher
    part_nbytes: int
    #: Whether a lane has one wire for several workers.
    collective: bool
    #: How long a wire may take to come together, in seconds.
    timeout: float
    #: How long workers wait for those that are late, and for a transfer that does not get on.
    patience: float

    @abstractmethod
    def tell(self, peer: DistPeer, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; False when the worker is gone."""

    @abstractmethod
    def offer(self, peer: DistPeer) -> None:
        """Tell the worker of the newest version, if it has not seen that."""

    @abstractmethod
    def packed(self, slot: Slot) -> int:
        """Return how many bytes of the slot may be sent already."""

    @abstractmethod
    def next_number(self) -> int:
        """A number for a wire."""

    @abstractmethod
    def open_wire(self, rendezvous: Rendezvous, size: int) -> TensorGroup:
        """The sender's end of a wire; blocks until the other ends are there."""

    @abstractmethod
    def expected(self) -> set[int]:
        """The workers that are connected, and have not the newest version meant for them."""
