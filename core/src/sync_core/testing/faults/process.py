"""What is done to processes: this one, a worker's, or a child that is started for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

_SLEEP = "import sys, time; time.sleep(float(sys.argv[1]))"
_RESUME = f"{_SLEEP}; import os, signal; os.kill(int(sys.argv[2]), signal.SIGCONT)"


def kill(pid: int) -> None:
    """End a process as a crash does: it runs nothing any more."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, seconds: float = 0.0) -> None:
    """Let a process stand still, as one does that swaps, or is in a debugger.

    Args:
        pid: the process, which may be this one.
        seconds: for how long; 0 for until somebody sends SIGCONT.
    """
    if not seconds:
        os.kill(pid, signal.SIGSTOP)
        return
    # A program of its own, since a process that stands still wakes nobody, least of all itself.
    arguments = [sys.executable, "-S", "-c", _RESUME, str(seconds), str(pid)]
    resume = subprocess.Popen(arguments)
    os.kill(pid, signal.SIGSTOP)
    resume.wait()


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
