"""The messages between the sender and the receivers of ``shm`` and ``mp``.

A worker asks, and is answered when there is something for it: a worker that does not receive
holds no slot, and what it is given is the newest version at that moment.

========  ====================================  ==========================================
from      message                               meaning
========  ====================================  ==========================================
worker    ``hello``, token, worker, pid         the first message of a connection
sender    ``welcome`` + descriptor              accepted; the descriptor is the `Board`
sender    ``gone``, reason                      refused, replaced, or the sender closes
worker    ``want``, seen, held                  wants a version newer than ``seen``
worker    ``never mind``                        takes the want back
sender    ``offer``, slot, digest + descriptor  the slot is the worker's to read
sender    ``nothing``                           answers ``never mind``
worker    ``answer``, version, error, held      committed, or not; reads only ``held`` now
========  ====================================  ==========================================
"""

from __future__ import annotations

import mmap
import os
import sys

from sync_plugin_std import memory
from sync_plugin_std.channel import Message

_CELL = 8
_WORKERS = 1 << 16


class Board:
    """For every worker the newest version meant for it, in shared memory.

    It lets a worker that looks for a new version find none without asking the sender. It is a
    hint: what a worker reads is settled by messages.
    """

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(descriptor, _WORKERS * _CELL, prot=protection)
        self._cells = memoryview(self._mapping).cast("Q")

    @classmethod
    def create(cls) -> Board:
        """A board on which nobody has a version yet."""
        descriptor = memory.create_sparse(_WORKERS * _CELL)
        return cls(descriptor, writable=True)

    def __getitem__(self, worker_id: int) -> int:
        return int(self._cells[worker_id])

    def __setitem__(self, worker_id: int, version: int) -> None:
        self._cells[worker_id] = version

    def close(self) -> None:
        """Release the memory."""
        self._cells.release()
        self._mapping.close()
        os.close(self.descriptor)


def hello(token: str, worker_id: int) -> Message:
    """The first message of a worker."""
    return {"type": "hello", "token": token, "worker": worker_id, "pid": os.getpid()}


def check_platform() -> None:
    """Raise `OSError` where there are no unix sockets to pass descriptors over."""
    if sys.platform == "win32":
        raise OSError("the schemes 'shm' and 'mp' need unix sockets; use 'thread' on Windows")
