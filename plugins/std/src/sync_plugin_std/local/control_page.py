"""The control plane between a sender and one worker of the same machine: a page and two events.

The page is shared memory of both. Each side writes its own half only, so a worker that has crashed
or lies can damage nothing but its own words:

=======  ===============================================================================
writer   words
=======  ===============================================================================
sender   whether a thread waits for answers; the offer: version, slot, digest of the layout
worker   the answer: version, times, and the slots that the worker still reads
=======  ===============================================================================

An offer and an answer each end with a checksum. The side that has written one sets the event that
belongs to it, and the other side reads the words only after it has taken that event. Setting and
taking an event are system calls on one object of the kernel, under one lock there, so what was
written before the first is read after the second, on every architecture. The checksum finds a
record whose writer does not keep to that.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from sync_core import Answer
from sync_plugin_std.local.shared_memory import SharedMemory

_NBYTES = mmap.PAGESIZE
_CHECKSUM = struct.Struct("=I")
_OFFER = struct.Struct("=QQQ")
_MOST_HELD = 16
# Version, clock, five times, how many slots are held, and which.
_ANSWER = struct.Struct(f"=QQdddddQ{_MOST_HELD}Q")
_CLOCK_DIGITS = 16
_NOTHING_HELD = (0,) * _MOST_HELD
# The sender's words are in the first half of a page, the worker's in the second.
_WAITING = 0
_OFFER_AT = slice(64, 64 + _OFFER.size + _CHECKSUM.size)
_ANSWER_AT = slice(2048, 2048 + _ANSWER.size + _CHECKSUM.size)


class Offer(NamedTuple):
    """A version that a worker may read.

    Args:
        version: the version.
        slot: the slot that it lies in.
        layout: the first 16 digits of the digest of its layout.
    """

    version: int
    slot: int
    layout: str


class ControlPage:
    """The words that a sender and one worker write for each other.

    Args:
        descriptor: of the page, which the sender has made; it may be closed after this.

    Raises:
        ValueError: it is of something else.

    Example:
        >>> page = ControlPage.create()
        >>> page.write_offer(Offer(version=3, slot=1, layout="00000000000000ff"))
        >>> ControlPage(page.descriptor).read_offer()
        Offer(version=3, slot=1, layout='00000000000000ff')
    """

    def __init__(self, descriptor: int) -> None:
        self._attach(SharedMemory(descriptor, writable=True, most=_NBYTES))

    @classmethod
    def create(cls) -> ControlPage:
        """A page without an offer or an answer.

        Raises:
            CapacityError: there is no memory for it, or no descriptor left.
        """
        page = cls.__new__(cls)
        page._attach(SharedMemory.create(_NBYTES, writable=True))
        return page

    def _attach(self, memory: SharedMemory) -> None:
        if memory.buffer.nbytes != _NBYTES:
            raise ValueError(f"a control page has {_NBYTES} bytes, got {memory.buffer.nbytes}")
        self._memory = memory
        self._bytes = memory.buffer

    @property
    def descriptor(self) -> int:
        """The descriptor by which the worker maps the page."""
        return self._memory.descriptor

    @property
    def waiting(self) -> bool:
        """Return whether a thread of the sender waits for answers, which it reads itself."""
        return self._bytes[_WAITING] != 0

    @waiting.setter
    def waiting(self, waits: bool) -> None:
        self._bytes[_WAITING] = waits

    def write_offer(self, offer: Offer | tuple[int, int, str]) -> None:
        """Offer a version, in place of the one before; the event of offers must not be set."""
        version, slot, layout = offer
        record = _OFFER.pack(version, slot, int(layout, 16))
        self._bytes[_OFFER_AT] = record + _CHECKSUM.pack(zlib.crc32(record))

    def read_offer(self) -> Offer:
        """Return the offer.

        Raises:
            ValueError: the checksum does not match.
        """
        words = bytes(self._bytes[_OFFER_AT])
        version, slot, layout = _OFFER.unpack_from(words)
        if _CHECKSUM.unpack_from(words, _OFFER.size) != (zlib.crc32(words[: _OFFER.size]),):
            raise ValueError("the offer does not match its checksum")
        return Offer(version, slot, f"{layout:016x}")

    def write_answer(self, answer: Answer, held: Sequence[int]) -> bool:
        """Write an answer; return False for one that has no place here, such as one with text.

        Args:
            answer: the answer.
            held: the slots that the worker still reads.
        """
        if answer.error is not None or len(held) > _MOST_HELD:
            return False
        if answer.clock is not None and len(answer.clock) != _CLOCK_DIGITS:
            return False
        record = _ANSWER.pack(
            answer.version,
            0 if answer.clock is None else int(answer.clock, 16),
            answer.stage_seconds,
            answer.commit_seconds,
            answer.pause_seconds,
            math.nan if answer.known_at is None else answer.known_at,
            math.nan if answer.answered_at is None else answer.answered_at,
            len(held),
            *held,
            *_NOTHING_HELD[len(held) :],
        )
        self._bytes[_ANSWER_AT] = record + _CHECKSUM.pack(zlib.crc32(record))
        return True

    def read_answer(self) -> tuple[Answer, list[int]] | None:
        """Return the answer and the slots that the worker still reads.

        None where the checksum does not match: the worker has begun to write the next answer, and
        will set the event again.

        Raises:
            ValueError: no worker answers so.
        """
        words = bytes(self._bytes[_ANSWER_AT])
        if _CHECKSUM.unpack_from(words, _ANSWER.size) != (zlib.crc32(words[: _ANSWER.size]),):
            return None
        version, clock, stage, commit, pause, known_at, answered_at, count, *held = (
            _ANSWER.unpack_from(words)
        )
        for seconds in (stage, commit, pause):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"an answer cannot have taken {seconds} s")
        if count > _MOST_HELD or math.isinf(known_at) or math.isinf(answered_at):
            raise ValueError("an answer cannot be of that time, or read that many slots")
        answer = Answer(
            version=version,
            stage_seconds=stage,
            commit_seconds=commit,
            pause_seconds=pause,
            known_at=None if math.isnan(known_at) else known_at,
            answered_at=None if math.isnan(answered_at) else answered_at,
            clock=f"{clock:0{_CLOCK_DIGITS}x}" if clock else None,
        )
        return answer, held[:count]

    def close(self) -> None:
        """Release the memory."""
        self._bytes.release()
        del self._memory


# An eventfd counts numbers of 8 bytes, and gives one; a pipe gives all that were written.
_ONCE = struct.pack("=Q", 1)
_MOST = 512


class ProcessEvent:
    """An event between two processes, which one sets and one takes: an eventfd, or else a pipe.

    Where both sides try to take it, one of them gets it.

    Args:
        reader: the descriptor to take it by, and to wait for it in a selector.
        writer: the descriptor to set it by, which may be the same one.

    Example:
        >>> event = ProcessEvent.create()
        >>> event.set()
        >>> event.take(), event.take()
        (True, False)
        >>> event.close()
    """

    def __init__(self, reader: int, writer: int) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    def create(cls) -> ProcessEvent:
        """An event that is not set.

        Raises:
            OSError: no descriptor is left.
        """
        if hasattr(os, "eventfd"):
            descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return cls(descriptor, descriptor)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        return cls(reader, writer)

    def set(self) -> None:
        """Set the event; a process that waits for it wakes up."""
        try:
            os.write(self.writer, _ONCE)
        except BlockingIOError:
            return  # it was set very often, and not taken: it is set

    def take(self) -> bool:
        """Take the event; False where it is not set."""
        try:
            return bool(os.read(self.reader, _MOST))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the descriptors; closing again is allowed."""
        descriptors = {self.reader, self.writer} - {-1}
        self.reader = self.writer = -1
        for descriptor in descriptors:
            os.close(descriptor)
