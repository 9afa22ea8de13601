"""Shared memory that leaves nothing behind: it goes with the last process that maps it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from sync_core import Block, CapacityError, OptionError

# https://man7.org/linux/man-pages/man2/F_GET_SEALS.2const.html; fcntl knows it by name since 3.13.
_F_SEAL_FUTURE_WRITE = 0x10
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def create(nbytes: int, directory: str | None = None) -> int:
    """A file descriptor of new shared memory, of mode 0600, its pages reserved.

    Args:
        nbytes: its size.
        directory: a directory in memory, such as ``/dev/shm``, to hold it; None for anonymous
            memory, which needs no room anywhere (containers give ``/dev/shm`` 64 MB).

    Raises:
        CapacityError: there is not enough memory, and what is needed and what there is; or this
            process can open no file more.
    """
    try:
        available = _available(directory)
        if nbytes > available:
            raise CapacityError(_shortage(nbytes, available, directory))
        descriptor = _open(directory)
    except OSError as error:
        if error.errno not in _TOO_MANY_FILES:
            raise
        raise CapacityError(
            "this process can open no more file descriptors, one of which a slot takes; "
            "type: ulimit -n 4096"
        ) from error
    try:
        if sys.platform == "linux":
            # Reserved now, since a page that cannot be had later is a bus error.
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise CapacityError(_shortage(nbytes, available, directory)) from error
    return descriptor


def create_sparse(nbytes: int) -> int:
    """A file descriptor of new anonymous memory whose pages come as they are written to.

    Raises:
        CapacityError: this process may make no file of that size.
    """
    descriptor = _open(None)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise CapacityError(_shortage(nbytes, _available(None), None)) from error
    return descriptor


class Mapping:
    """Shared memory in this process, all its pages mapped, for as long as anything views it.

    Args:
        descriptor: of the memory; it may be closed.
        writable: whether it may be written to from here.
    """

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        size = os.fstat(descriptor).st_size
        self._pages = mmap.mmap(
            descriptor, size, flags=mmap.MAP_SHARED | _POPULATE, prot=protection
        )
        self._block = self._lay_block()
        self._address = self._block.memory.data_ptr()

    @property
    def block(self) -> Block:
        """A block that lies there: the same one, unless torch has moved that elsewhere.

        It does so when a tensor that views it is shared: `share_memory_`, `torch.multiprocessing`.
        """
        if self._block.memory.data_ptr() != self._address:
            self._block = self._lay_block()
        return self._block

    def _lay_block(self) -> Block:
        with warnings.catch_warnings():
            # torch warns that it does not know of read-only memory; nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return Block(torch.frombuffer(self._pages, dtype=torch.uint8))


def seal(descriptor: int) -> None:
    """Let nobody who is given the descriptor write to the memory from now on, or cut it short.

    What is mapped already stays writable: by the sender. Only anonymous memory can be sealed, and
    only since Linux 5.1 against being written to.
    """
    if sys.platform != "linux":
        return
    fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for seals in (fixed, _F_SEAL_FUTURE_WRITE):
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
        "use fewer slots=, or a layer such as 'bf16'"
        if directory is None
        else "leave out directory= to use anonymous memory, or give it more room"
    )
    return f"a slot needs {nbytes} bytes of {where}, {available} are available; {remedy}"
