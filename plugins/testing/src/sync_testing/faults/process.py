"""Processes that are killed, stopped or forked, and limits of files and memory."""

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
# How long a process may take to stand still: one that waits for a disk does not at once.
_PATIENCE = 5.0


def kill(pid: int) -> None:
    """End a process as a crash does: it runs nothing any more."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, seconds: float = 0.0) -> None:
    """Let a process stand still, as one does that swaps, or is in a debugger.

    When this returns, it has stood still; a thread that stops its own process does not run on.

    Args:
        pid: the process, which may be this one.
        seconds: for how long; 0 for until it gets SIGCONT.

    Raises:
        TimeoutError: it does not stand still.
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
        # A separate program, since a stopped process cannot wake itself.
        arguments = [sys.executable, "-S", "-c", _RESUME, str(seconds), str(os.getpid())]
        resume = subprocess.Popen(arguments)
    # The system gives a signal for a process to any of its threads, the main one as a rule, and
    # the others run on until that has its turn. This one is given to the thread itself.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    if resume is not None:
        resume.wait()


def _stands_still(pid: int) -> bool:
    # The state follows the name, which is in parentheses and may have any characters.
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)


def fork(seconds: float) -> None:
    """Have a copy of this process that holds all of its descriptors, and does nothing."""
    with warnings.catch_warnings():
        # Its warning is expected here: there are threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    threading.Thread(target=os.waitpid, args=(pid, 0), name="fork", daemon=True).start()


def execute(seconds: float) -> None:
    """Have a program run that is given every descriptor that can be inherited."""
    program = subprocess.Popen([sys.executable, "-S", "-c", _SLEEP, str(seconds)], close_fds=False)
    threading.Thread(target=program.wait, name="exec", daemon=True).start()


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
    # The limit applies to the number of a new descriptor, the lowest that is free.
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
