"""Runs a program, and ends every process that it has started when it ends or is told to (Linux).

    python tests/chaos/guard.py tests/chaos/chaos.py --schemes shm

What hurts workers leaves some of them stopped while it runs, and those do not notice that whoever
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
    """Run a command until it ends, or this process is told to end; nothing is left of it then.

    Returns:
        Its exit code.

    Raises:
        SystemExit: this process was told to end, by SIGTERM, SIGINT (Ctrl-C) or SIGHUP.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _TOLD_TO_END:
        signal.signal(number, _end)
    try:
        # A session of its own, since Ctrl-C is for this process to act on.
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
