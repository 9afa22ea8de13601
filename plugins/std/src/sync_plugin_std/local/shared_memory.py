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

import errno
import fcntl
import mmap
import operator
import os
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from sync_core.errors import CapacityError, OptionError
from sync_core.transports import Block
from sync_plugin_std.local.channel import (
    TOO_MANY_FILES,
    Channel,
    Message,
    no_more_descriptors,
)
from sync_plugin_std.local.publisher import Slot

# https://man7.org/linux/man-pages/man2/F_GET_SEALS.2const.html; fcntl knows it by name since 3.13.
_F_SEAL_FUTURE_WRITE = 0x10
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class SharedMemory:
    """Memory that processes of one machine share, mapped here for as long as anything views it.

    Args:
        descriptor: of the memory, which another process has made; it may be closed after this.
        populate: whether all its pages are mapped at once.
        writable: whether it is written to here; its creator must have allowed that.
        most: the most bytes that there is any reason for; None: any number.

    Raises:
        CapacityError: there is no room for it here.
        ValueError: the descriptor is of something else, or of more bytes.

    Example:
        >>> memory = SharedMemory.create(4096)
        >>> memory.block.memory[7] = 1
        >>> elsewhere = SharedMemory(memory.descriptor)
        >>> int(elsewhere.block.memory[7])
        1
    """

    _pages: mmap.mmap
    _block: Block
    _address: int

    def __init__(
        self,
        descriptor: int,
        *,
        populate: bool = True,
        writable: bool = False,
        most: int | None = None,
    ) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        nbytes = os.fstat(descriptor).st_size
        if most is not None and nbytes > most:
            raise ValueError(f"the memory has {nbytes} bytes, and there is reason for {most} only")
        self._map(descriptor, protection, populate=populate)

    @classmethod
    def create(
        cls,
        nbytes: int,
        directory: str | None = None,
        *,
        sparse: bool = False,
        writable: bool = False,
        remedy: str = "",
    ) -> SharedMemory:
        """New memory of mode 0600, which only this process can write to unless it allows more.

        Its descriptor is closed with its block.

        Args:
            nbytes: its size.
            directory: a directory in memory, such as ``/dev/shm``, to hold it; None for anonymous
                memory, which needs no room anywhere (containers give ``/dev/shm`` 64 MB).
            sparse: whether its pages come as they are written to, and are not reserved.
            writable: whether a process that gets the descriptor may write to it; it cannot
                shrink it, so that nothing it does makes the memory disappear here.
            remedy: what to type to do without, should the machine refuse to share any.

        Raises:
            CapacityError: there is not enough memory, and what is needed and what there is; or
                this process cannot open another file, or the machine cannot.
            OptionError: the directory cannot hold it.
        """
        descriptor = _create(nbytes, directory, sparse=sparse, remedy=remedy)
        memory = cls.__new__(cls)
        try:
            memory._map(descriptor, mmap.PROT_READ | mmap.PROT_WRITE, populate=not sparse)
        except BaseException:
            os.close(descriptor)
            raise
        _seal(descriptor, writable=writable)
        # Not at the end of this process, while a thread may send it to a worker.
        weakref.finalize(memory._block, os.close, descriptor).atexit = False
        return memory

    @property
    def block(self) -> Block:
        """A block that lies there: the same one, unless torch has moved that elsewhere.

        It does so when a tensor that views it is shared: `share_memory_`, `torch.multiprocessing`.
        """
        if self._block.memory.data_ptr() != self._address:
            self._block = self._lay_block()
        return self._block

    @property
    def buffer(self) -> memoryview:
        """The bytes themselves."""
        return memoryview(self._pages)

    def _map(self, descriptor: int, protection: int, *, populate: bool) -> None:
        flags = mmap.MAP_SHARED | (_POPULATE if populate else 0)
        size = os.fstat(descriptor).st_size
        try:
            self._pages = mmap.mmap(descriptor, size, flags=flags, prot=protection)
        except OSError as error:
            # Python's mmap keeps a duplicate of the descriptor.
            if error.errno in TOO_MANY_FILES:
                raise no_more_descriptors() from error
            if error.errno != errno.ENOMEM:
                raise ValueError(f"the descriptor is of no memory: {error}") from error
            raise CapacityError(f"{size} bytes of memory cannot be mapped: {error}") from error
        #: By which others map it.
        self.descriptor = descriptor
        self._block = self._lay_block()
        self._address = self._block.memory.data_ptr()

    def _lay_block(self) -> Block:
        with warnings.catch_warnings():
            # torch warns that it does not know of read-only memory; nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return Block(torch.frombuffer(self._pages, dtype=torch.uint8))


def _create(nbytes: int, directory: str | None, *, sparse: bool, remedy: str) -> int:
    try:
        available = _available(directory)
        if nbytes > available and not sparse:
            raise CapacityError(_shortage(nbytes, available, directory))
        descriptor = _open(directory)
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise no_more_descriptors() from error
        refusal = f"this machine gives no shared memory: {error}"
        raise CapacityError("; ".join(filter(None, [refusal, remedy]))) from error
    try:
        if sys.platform == "linux" and not sparse:
            # Reserved now, since a page that cannot be had later is a bus error.
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise CapacityError(_shortage(nbytes, available, directory)) from error
    return descriptor


def _seal(descriptor: int, *, writable: bool) -> None:
    """Seal the memory: no holder of the descriptor can shrink it, or write to it, from now on.

    Existing mappings, the sender's, stay writable. Only anonymous memory can be sealed, and
    only since Linux 5.1 against being written to.
    """
    if sys.platform != "linux":
        return
    fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for seals in (fixed,) if writable else (fixed, _F_SEAL_FUTURE_WRITE):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def _open(directory: str | None) -> int:
    if directory is None and sys.platform == "linux":
        descriptor = os.memfd_create("sync-core", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(descriptor, 0o600)
        return descriptor
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())


def _available(directory: str | None) -> int:
    if directory is not None:
        try:
            space = os.statvfs(directory)
        except OSError as error:
            raise OptionError(f"directory={directory!r} cannot hold slots: {error}") from error
        return space.f_bavail * space.f_frsize
    if sys.platform != "linux":
        return sys.maxsize
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _cgroup_room())
    return _cgroup_room()


def _cgroup_room() -> int:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return sys.maxsize
    return sys.maxsize if limit == "max" else int(limit) - int(used)


def _shortage(nbytes: int, available: int, directory: str | None) -> str:
    where = "memory" if directory is None else directory
    remedy = (
        "use a layer such as 'bf16', or fewer slots= where the scheme has them"
        if directory is None
        else "leave out directory= to use anonymous memory, or give it more room"
    )
    return f"a slot needs {nbytes} bytes of {where}, {available} are available; {remedy}"


_index = operator.attrgetter("index")


class SharedSlots:
    """The sender's side: makes the memory, and knows what to announce to a worker.

    Args:
        directory: see `SharedMemory.create`.
        remedy: what to type, for the error.
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
        """Return the message that must precede an offer of a slot; None if none must.

        Args:
            known: the slots that were announced to it; updated here.
            offered: the slot.
            slots: those that there are.

        Returns:
            The message, and the descriptors that go with it.
        """
        live = set(map(_index, slots))
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
    """A worker's side: the slots that were announced, and those that it reads.

    Args:
        most: the most bytes that there is reason for in a slot; None: any number.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._mapped: dict[int, SharedMemory] = {}
        self._held: set[int] = set()

    @property
    def held(self) -> list[int]:
        """The slots that are read, which each answer lists."""
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
            # Not what the index meant before, where this cannot be opened.
            self._mapped.pop(message["index"], None)
            descriptor = channel.pop_descriptor()
            try:
                self._mapped[message["index"]] = SharedMemory(descriptor, most=self._most)
            finally:
                os.close(descriptor)
        self._mapped = {index: slot for index, slot in self._mapped.items() if index in live}
        return True

    def hold(self, index: int) -> tuple[Block, Callable[[], None]] | None:
        """The memory of a slot, which is read until the function is called.

        None where the slot was not announced yet.
        """
        memory = self._mapped.get(index)
        if memory is None:
            return None
        block = memory.block
        self._held.add(index)
        return block, partial(self.release, index)

    def release(self, index: int) -> None:
        """Note that a slot is no longer read."""
        self._held.discard(index)

    def clear(self) -> None:
        """Release all of them."""
        self._mapped.clear()
