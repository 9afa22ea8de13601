"""Kills, stops and forks processes, and limits their files and memory."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SLEEP = "import sys, time; time.sleep(float(sys.argv[1]))"
_RESUME = f"{_SLEEP}; import os, signal; os.kill(int(sys.argv[2]), signal.SIGCONT)"
# How long a process may take to stop: a process that waits for a disk does not stop at once.
_PATIENCE = 5.0


def kill(pid: int) -> None:
    """End a process at once, as a crash does."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, seconds: float = 0.0) -> None:
    """Stop a process, as if it swaps or is in a debugger.

    The process has stopped when this returns. A thread that stops its own process does not
    continue.

    Args:
        pid: the process, which may be this one.
        seconds: the duration; 0 until the process gets SIGCONT.

    Raises:
        TimeoutError: the process did not stop.
    """
    if pid == os.getpid():
        _stop_here(seconds)
        return
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _PATIENCE
    while not _stands_still(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not stop within {_PATIENCE:g} s")
        time.sleep(0.001)
    if seconds:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def _stop_here(seconds: float) -> None:
    resume = None
    if seconds:
        # A separate program, since a stopped process cannot continue itself.
        arguments = [sys.executable, "-S", "-c", _RESUME, str(seconds), str(os.getpid())]
        resume = subprocess.Popen(arguments)
    # The system delivers a process's signal to any thread, usually the main one, and the other
    # threads run until that one is scheduled. This signal goes to the calling thread itself.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    if resume is not None:
        resume.wait()


def _stands_still(pid: int) -> bool:
    # The state follows the name, which is in parentheses and may contain any character.
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)


def fork(seconds: float) -> None:
    """Fork a child that holds all descriptors of this process and does nothing."""
    with warnings.catch_warnings():
        # The warning about threads is expected here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    threading.Thread(target=os.waitpid, args=(pid, 0), name="fork", daemon=True).start()


def execute(seconds: float) -> None:
    """Start a program that inherits every inheritable descriptor."""
    program = subprocess.Popen([sys.executable, "-S", "-c", _SLEEP, str(seconds)], close_fds=False)
    threading.Thread(target=program.wait, name="exec", daemon=True).start()


_GIB = 1 << 30


@contextmanager
def few_descriptors(left: int = 0) -> Iterator[None]:
    """For ``with``: let this process open only a few more descriptors.

    Args:
        left: the number of descriptors.

    Example:
        >>> with few_descriptors(left=0):
        ...     os.open("/", os.O_RDONLY)
        Traceback (most recent call last):
            ...
        OSError: [Errno 24] Too many open files: '/'
    """
    probe = os.dup(0)
    os.close(probe)
    # The limit applies to the number of a new descriptor, which is the lowest free one.
    with _limited(resource.RLIMIT_NOFILE, probe + left):
        yield


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """For ``with``: limit the size of files and shared memory that this process makes.

    Allocations in ``/dev/shm`` and of anonymous shared memory then fail as if memory were full,
    without any effect on other programs.

    Args:
        nbytes: the largest size.

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
    """For ``with``: fill a directory in memory, such as ``/dev/shm``, and empty it afterwards.

    Use it on a machine or container with little shared memory: every program there is affected. The
    file has no name, so it vanishes even after a crash.

    Args:
        directory: the directory.
        left: the number of bytes to leave free.
        at_most: the most bytes to fill.

    Raises:
        ValueError: more than ``at_most`` bytes would be filled.
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
