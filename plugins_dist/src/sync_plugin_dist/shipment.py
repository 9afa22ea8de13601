"""A version on its way over a wire."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sync_core.transports import Message, Slot
from sync_plugin_dist.office import DistPeer
from sync_plugin_dist.wire import Wire


@dataclass(eq=False)
class Shipment:
    """Which parts have gone, and who has not got all of them.

    Args:
        slot: where the version lies.
        parts: as it is sent.
        missing: who has not received all of it.
    """

    slot: Slot
    parts: list[Tensor]
    missing: set[DistPeer]
    _sent: int = 0
    _bytes_sent: int = 0
    _reached: tuple[int, ...] = ()

    def announcement(self, number: int, part_nbytes: int) -> Message:
        """What tells a worker that this follows over the wire ``number``."""
        return {
            "type": "data",
            "number": number,
            "version": self.slot.version,
            "digest": self.slot.digest,
            "nbytes": self.slot.nbytes,
            "part": part_nbytes,
        }

    def pump(self, wire: Wire, ready: int) -> None:
        """Send the parts that lie within the first ``ready`` bytes and have not gone.

        Raises:
            RuntimeError: the wire does not work.
        """
        while self._sent < len(self.parts):
            part = self.parts[self._sent]
            if self._bytes_sent + part.nbytes > ready:
                return
            wire.send(part)
            self._sent += 1
            self._bytes_sent += part.nbytes
            if self._sent == len(self.parts):
                wire.finish(self.slot.version)

    def gets_on(self, wire: Wire) -> bool:
        """Whether anything has moved since this was last asked."""
        before = self._reached
        self._reached = (self._sent, wire.progress(), -len(self.missing))
        return self._reached != before
