"""The messages between the sender and the receivers of ``shm`` and ``mp``.

The newest version meant for a worker stands on the `Board`: its number, its slot, its layout. To
offer it, the sender puts a token (one byte) into the worker's `TokenPipe`; to accept it, the worker
takes the token out. The sender may take it out as well, which revokes the offer. The kernel gives
the byte to one of them, so the holder is always known: a worker that does not receive holds
no slot, and what it accepts is the newest version at that moment.

What else there is to say goes over a socket:

========  =====================================  ===============================================
from      message                                meaning
========  =====================================  ===============================================
worker    ``hello``, token, worker, pid          the first message of a connection
sender    ``welcome`` + 3 descriptors            accepted; the board, and its ends of two pipes
sender    ``slot``, index, live + descriptor     a slot that will be offered; those there are
sender    ``live``, live                         the slots that there are, as some are no more
worker    ``answer``, answer, held               committed, or not; reads only ``held`` from now
worker    ``look``                               its answer is in its pipe; see `answers`
worker    ``lacks``, index                       it could not open a slot that was announced
worker    ``on``, version, held                  asks for more, and will not answer about this one
worker    ``leave``, reason                      it closes its receiver
sender    ``gone``, reason                       refused, replaced, removed, or the sender closes
========  =====================================  ===============================================
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from sync_core.transports import SharedMemory

_FIELDS = 4  # three are used; a cell is 32 bytes, so that none crosses a cache line
_WORKERS = 1 << 16
_WAITING = _WORKERS * _FIELDS  # the word that says whether a thread waits for answers
_NBYTES = (_WAITING + 1) * 8


@dataclass(frozen=True, slots=True)
class Offer:
    """A version that a worker may read.

    Args:
        version: the version.
        slot: the slot that it lies in.
        layout: the first 16 digits of the digest of its layout.
    """

    version: int
    slot: int
    layout: str


class Board:
    """For every worker the offer that its token stands for, in shared memory.

    The sender writes a cell only while it holds the worker's token, so a worker that has taken the
    token reads a cell that is never written.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._cells = memory.buffer.cast("Q")

    @classmethod
    def create(cls) -> Board:
        """A board without offers."""
        return cls(SharedMemory.create(_NBYTES, sparse=True))

    @classmethod
    def of(cls, descriptor: int) -> Board:
        """The board that a sender has made.

        Raises:
            ValueError: it is invalid.
        """
        memory = SharedMemory(descriptor, populate=False)
        if memory.block.nbytes != _NBYTES:
            raise ValueError(f"a board of {memory.block.nbytes} bytes")
        return cls(memory)

    @property
    def descriptor(self) -> int:
        """By which workers map the board."""
        return self._memory.descriptor

    @property
    def waiting(self) -> bool:
        """Return whether a thread of the sender waits for answers; see `answers`."""
        return bool(self._cells[_WAITING])

    @waiting.setter
    def waiting(self, waits: bool) -> None:
        self._cells[_WAITING] = waits

    def __getitem__(self, worker_id: int) -> Offer:
        start = worker_id * _FIELDS
        version, slot, layout = self._cells[start : start + 3].tolist()
        return Offer(version, slot, f"{layout:016x}")

    def __setitem__(self, worker_id: int, offer: Offer) -> None:
        start = worker_id * _FIELDS
        self._cells[start] = offer.version
        self._cells[start + 1] = offer.slot
        self._cells[start + 2] = int(offer.layout, 16)

    def close(self) -> None:
        """Release the memory."""
        self._cells.release()
        del self._memory


class TokenPipe:
    """The pipe from which either the worker or the sender takes the token of an offer."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def put(self) -> None:
        """Offer: the worker wakes up, if it is waiting."""
        os.write(self._writer, b"\1")

    def revoke(self) -> bool:
        """Take the token back; False when the worker was faster."""
        return take_token(self.reader)

    def close(self) -> None:
        """Release both ends."""
        os.close(self.reader)
        os.close(self._writer)


def take_token(reader: int) -> bool:
    """Take the token out of the pipe; False when there is none, or no sender any more."""
    try:
        return bool(os.read(reader, 1))
    except BlockingIOError:
        return False


def check_platform() -> None:
    """Raise `OSError` where there are no unix sockets to pass descriptors over."""
    if sys.platform == "win32":
        raise OSError("the schemes 'shm' and 'mp' need unix sockets; use 'thread' on Windows")
