"""Starts worker processes: forked where that is safe with what is loaded, else fresh."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sync_core.processes.fork_server import Request
from sync_core.processes.fresh import FreshProcess, absolute_path
from sync_core.processes.worker_process import WorkerProcess

if sys.platform == "linux":
    from sync_core.processes.current import fork


def start_process(main: str, *args: str, fds: Sequence[int] = ()) -> WorkerProcess:
    """Start a process that runs one function with torch and the core loaded, and then ends.

    It has this process's environment, directory, ``sys.path``, standard output and error. Its
    standard input is empty, and it ignores Ctrl-C. It does not end with this process: give it a
    descriptor by which it learns that this one has ended.

    On Linux it is the fork of a process that was started for that (docs/decisions/0006): only the
    first takes as long as torch takes to load.

    Args:
        main: the function, as ``"package.module:function"``.
        *args: what it is given after the descriptors.
        fds: descriptors that it gets copies of; they come first, under numbers of their own.

    Raises:
        ChildProcessError: the process that is forked ended; what it said is on standard error.

    Example:
        >>> reading, writing = os.pipe()
        >>> process = start_process("os:close", fds=[writing])
        >>> process.exited(timeout=60), process.returncode
        (True, 0)
    """
    if sys.platform != "linux":
        return FreshProcess(main, args, fds)
    request = Request(main, list(args), absolute_path(), dict(os.environ))
    return fork(request, fds)
