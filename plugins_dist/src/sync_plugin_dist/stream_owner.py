"""The interface of the sender to its streams, and its view of a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sync_plugin_dist.process_group import TensorGroup
from sync_plugin_dist.rendezvous import Rendezvous
from sync_plugin_std.local import LocalPeer, Message, Publisher, Slot


@dataclass(eq=False)
class DistPeer(LocalPeer):
    """A worker.

    Args:
        served: whether it is served: its hello has arrived, and it was not replaced.
        local: whether it reads versions in the sender's memory.
        announced: the newest version that was announced to it, if it has a stream.
    """

    served: bool = False
    local: bool = False
    announced: int = 0

    @property
    def id(self) -> int:
        """Its worker's id, which is known once it is served."""
        assert self.worker_id is not None
        return self.worker_id


class StreamOwner(ABC):
    """A sender, to its streams."""

    part_nbytes: int
    #: Whether a stream has one wire for several workers.
    collective: bool
    #: How long a wire may take to come together, in seconds.
    timeout: float
    #: How long workers wait for those that are late, and for a transfer that does not get on.
    patience: float

    @property
    @abstractmethod
    def publisher(self) -> Publisher:
        """The slots and the workers."""

    @abstractmethod
    def tell(self, peer: DistPeer, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; False when the worker is gone."""

    @abstractmethod
    def offer_peer(self, peer: DistPeer) -> None:
        """Tell the worker of the newest version, if it has not seen that."""

    @abstractmethod
    def packed(self, slot: Slot) -> int:
        """Return how many bytes of the slot may be sent already."""

    @abstractmethod
    def sum_of(self, slot: Slot) -> str | None:
        """Return the sum of a version; None where it is not packed, or workers do not verify."""

    @abstractmethod
    def next_number(self) -> int:
        """A number for a wire."""

    @abstractmethod
    def open_wire(self, rendezvous: Rendezvous, size: int) -> TensorGroup:
        """The sender's end of a wire; blocks until the other ends are there."""

    @abstractmethod
    def expected(self) -> set[int]:
        """The workers that are connected, and have not the newest version meant for them."""
