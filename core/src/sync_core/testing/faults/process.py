"""What is done to processes: this one, a worker's, or a child that is started for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
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
        seconds: for how long; 0 for until somebody sends SIGCONT.

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
        # A program of its own, since a process that stands still wakes nobody, least of all itself.
        arguments = [sys.executable, "-S", "-c", _RESUME, str(seconds), str(os.getpid())]
        resume = subprocess.Popen(arguments)
    # The system gives a signal for a process to any of its threads, the main one as a rule, and
    # the others run on until that has its turn. This one is given to the thread itself.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    if resume is not None:
        resume.wait()


def _stands_still(pid: int) -> bool:
    # The state follows the name, which stands in parentheses and may have any characters.
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)


def fork(seconds: float) -> None:
    """Have a copy of this process that holds all of its descriptors, and does nothing."""
    with warnings.catch_warnings():
        # What it says is what is being tried here: there are threads.
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
