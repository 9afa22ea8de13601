"""Takes from this process what the system gives: descriptors, files of any size, room in memory."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_GIB = 1 << 30


@contextmanager
def few_descriptors(left: int = 0) -> Iterator[None]:
    """Let this process open only so many more descriptors; as before at the end.

    Args:
        left: how many.

    Example:
        >>> with few_descriptors(left=0):
        ...     os.open("/", os.O_RDONLY)
        Traceback (most recent call last):
            ...
        OSError: [Errno 24] Too many open files: '/'
    """
    probe = os.dup(0)
    os.close(probe)
    # What the limit counts is the number of a new descriptor, which is the lowest that is free.
    with _limited(resource.RLIMIT_NOFILE, probe + left):
        yield


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """Let this process make no file larger than this, and no piece of shared memory either.

    By this, allocations in ``/dev/shm`` and of anonymous shared memory fail as they do where
    there is no room, and nothing else on the machine is short of any.

    Args:
        nbytes: the size.

    Example:
        >>> with small_files(4096), tempfile.TemporaryFile() as file:
        ...     os.posix_fallocate(file.fileno(), 0, 8192)
        Traceback (most recent call last):
            ...
        OSError: [Errno 27] File too large
    """
    with _limited(resource.RLIMIT_FSIZE, nbytes):
        yield


@contextmanager
def full(directory: str, left: int = 0, at_most: int = _GIB) -> Iterator[None]:
    """Fill a directory in memory, such as ``/dev/shm``; empty it again at the end.

    For machines, or containers, where that is small: every program there feels it. The file has no
    name, so that not even a crash leaves it behind.

    Args:
        directory: the directory.
        left: how many bytes to leave.
        at_most: refuse to take more than this.

    Raises:
        ValueError: more than ``at_most`` would have to be taken.
    """
    taken = shutil.disk_usage(directory).free - left
    if taken > at_most:
        raise ValueError(
            f"to fill {directory} takes {taken} bytes, more than at_most={at_most}; "
            "use small_files(), which takes none"
        )
    with tempfile.TemporaryFile(dir=directory) as file:
        if taken > 0:
            os.posix_fallocate(file.fileno(), 0, taken)
        yield


@contextmanager
def _limited(kind: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))
