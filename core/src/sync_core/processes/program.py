"""What a worker's process does: it runs one function, and then ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn


def run(main: str, given: Sequence[int | str]) -> NoReturn:
    """Run the function that ``main`` names, ``"package.module:function"``, and end the process.

    Ctrl-C is ignored from here on: it is for the process that asked for this one to act on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code = 0
    try:
        module, _, function = main.partition(":")
        getattr(import_module(module), function)(*given)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What a program is promised at its end, without taking its modules apart: that does nobody
    # any good, and takes torch half a second. No public function runs the exit handlers.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
