"""The slots of a publisher in shared memory, as their sender and its workers know them.

A worker maps each slot once, by a descriptor that comes with the first offer of it:

========  ==================================  ====================================================
from      message                             meaning
========  ==================================  ====================================================
sender    ``slot``, index, live + descriptor  a slot that will be offered, and those that there are
sender    ``live``, live                      the slots that there are, as some are no more
========  ==================================  ====================================================
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from sync_core.transports.channel import Channel, Message
from sync_core.transports.publisher import Slot
from sync_core.transports.shared_memory import SharedMemory
from sync_core.weights.block import Block


class SharedSlots:
    """The sender's: makes the memory, and knows what a worker has to be told.

    Args:
        directory: see `SharedMemory.create`.
        remedy: likewise.
    """

    def __init__(self, directory: str | None = None, *, remedy: str = "") -> None:
        self._directory = directory
        self._remedy = remedy
        self._descriptors: weakref.WeakKeyDictionary[Block, int] = weakref.WeakKeyDictionary()

    def allocate(self, nbytes: int) -> Block:
        """Memory for a slot, as a `Publisher` asks for it.

        Raises:
            CapacityError: there is not enough.
        """
        memory = SharedMemory.create(nbytes, self._directory, remedy=self._remedy)
        self._descriptors[memory.block] = memory.descriptor
        return memory.block

    def news(
        self, known: set[int], offered: Slot, slots: Sequence[Slot]
    ) -> tuple[Message, tuple[int, ...]] | None:
        """What a worker has to hear before it is offered a slot; None for nothing.

        Args:
            known: the slots that it was told of, which is brought up to date.
            offered: the slot.
            slots: those that there are.

        Returns:
            The message, and the descriptors that go with it.
        """
        live = {slot.index for slot in slots}
        if offered.index in known:
            if known <= live:
                return None
            known &= live
            return {"type": "live", "live": list(known)}, ()
        known &= live
        known.add(offered.index)
        message = {"type": "slot", "index": offered.index, "live": list(known)}
        return message, (self._descriptors[offered.block],)


class MappedSlots:
    """A worker's: those that it was told of, and which of them it reads."""

    def __init__(self) -> None:
        self._mapped: dict[int, SharedMemory] = {}
        self._held: set[int] = set()

    @property
    def held(self) -> list[int]:
        """The slots that are read, of which the sender is told with each answer."""
        return list(self._held)

    def hear(self, message: Message, channel: Channel) -> bool:
        """Act on a message, if it is about slots.

        Raises:
            CapacityError: there is no room for the slot here, or no descriptor left.
            ConnectionError: it came without its descriptor.
            LookupError, TypeError, ValueError: no sender says such a thing.
        """
        if message["type"] not in ("slot", "live"):
            return False
        live = set(message["live"])
        if message["type"] == "slot":
            descriptor = channel.pop_descriptor()
            try:
                self._mapped[message["index"]] = SharedMemory(descriptor)
            finally:
                os.close(descriptor)
        self._mapped = {index: slot for index, slot in self._mapped.items() if index in live}
        return True

    def __contains__(self, index: int) -> bool:
        return index in self._mapped

    def hold(self, index: int) -> tuple[Block, Callable[[], None]]:
        """The memory of a slot, which is read until the function is called.

        Raises:
            KeyError: there is no such slot.
        """
        block = self._mapped[index].block
        self._held.add(index)
        return block, partial(self._held.discard, index)

    def clear(self) -> None:
        """Let go of all of them."""
        self._mapped.clear()
