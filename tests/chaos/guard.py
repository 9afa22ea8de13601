"""Runs a program, and ends every process that it started when it ends or gets a signal (Linux).

    python tests/chaos/guard.py tests/chaos/chaos.py --schemes shm

Faults leave some workers stopped while they last, and those do not notice that the process that
started them is gone. So this process becomes the parent of all that are orphaned, and kills what is
left (https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import psutil  # type: ignore[import-untyped]

_PR_SET_CHILD_SUBREAPER = 36
_TOLD_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(command: Sequence[str]) -> int:
    """Run a command until it ends, or this process gets a signal; nothing is left of it then.

    Returns:
        Its exit code.

    Raises:
        SystemExit: this process got SIGTERM, SIGINT (Ctrl-C) or SIGHUP.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _TOLD_TO_END:
        signal.signal(number, _end)
    try:
        # Its own session, since Ctrl-C is for this process to act on.
        return subprocess.call(command, start_new_session=True)
    finally:
        for number in _TOLD_TO_END:
            signal.signal(number, signal.SIG_IGN)
        _kill_descendants()


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _kill_descendants() -> None:
    while True:
        # Again after each death, as what it had started meanwhile is known only then.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(run([sys.executable, *sys.argv[1:]]))
