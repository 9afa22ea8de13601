"""The process that has torch loaded and forks whenever it is asked for a worker.

Loading torch takes seconds of a core; a fork takes milliseconds, and shares what was loaded. The
server never runs anything but imports before it forks, has one thread, and talks to the process
that started it alone. `multiprocessing` has such a server too, but it runs the caller's
``__main__`` again (docs/decisions/0006-processes.md), and what it forks has the environment, the
directory and the standard output of the time when the server was started.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, NoReturn

from sync_plugin_std.local.channel import (
    close_when_forked,
    creator_of,
    no_more_descriptors,
    open_process,
)


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
    # The exit handlers, without the destruction of modules, which is of no
    # use and takes torch half a second. No public function runs the exit handlers.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# How long the server waits for another request when nothing that it has forked lives, in seconds.
_LINGER = 30.0
# How long after SIGTERM the processes that a worker has left behind are killed, in seconds: an
# estimate of what a simulator takes to end.
_LEAVING = 2.0

# A request: its length, with the descriptors; then the text.
_LENGTH = 4
_MAX_DESCRIPTORS = 16


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The request for a forked process: its function and directory.

    Args:
        main: the function, as ``"package.module:function"``.
        args: what it is given after the descriptors.
        path: ``sys.path``.
        environment: ``os.environ``.
    """

    main: str
    args: list[str]
    path: list[str]
    environment: dict[str, str]


def send_request(control: socket.socket, request: ForkRequest, descriptors: list[int]) -> None:
    """Ask for a process.

    Args:
        control: the connection to the server.
        request: what it is to run.
        descriptors: its standard output and error, its directory, and what it is given.
    """
    text = json.dumps(asdict(request)).encode()
    socket.send_fds(control, [len(text).to_bytes(_LENGTH, "big")], descriptors)
    control.sendall(text)


def receive_reply(control: socket.socket) -> tuple[int, int, int]:
    """The process: its id, a descriptor of it, and one from which its wait status can be read.

    Raises:
        ConnectionError: the server has ended.
        CapacityError: this process can open no more descriptors.
    """
    data, descriptors, flags, _ = socket.recv_fds(control, _LENGTH, 2)
    if len(data) != _LENGTH or len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC:
            raise no_more_descriptors()
        raise ConnectionResetError("the server hung up")
    return int.from_bytes(data, "big"), descriptors[0], descriptors[1]


_SURVIVED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(control: int, load: str) -> NoReturn:
    """Serve until the other end of ``control`` is closed and nothing that was forked lives.

    Args:
        control: the connection to the process that asks.
        load: what is imported before anything is forked, separated by commas: modules, or names
            of lazy packages, such as ``sync_core:Receiver``.
    """
    # It outlives whatever ends its parent and the workers, to end what these have left behind.
    os.setpgid(0, 0)
    for number in _SURVIVED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for each in load.split(","):
        module, _, name = each.partition(":")
        imported = importlib.import_module(module)
        if name:
            getattr(imported, name)
    # Imported modules are never freed; a collection would only write to shared memory.
    gc.freeze()
    gc.enable()
    connection = socket.socket(fileno=control)
    close_when_forked(connection)
    _Server(connection).serve()
    os._exit(0)


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._asked = True
        # Where none can be had, it ends with the last process that has the other end of `control`.
        self._parent: int | None = None
        try:
            self._parent = open_process(creator_of(control))
        except ConnectionError:
            self._asked = False
        self._statuses: dict[int, int] = {}
        # Process groups of workers that have ended, and when what is left of each is killed.
        self._left: dict[int, float] = {}
        self._woken, self._wake_up = os.pipe()
        os.set_blocking(self._wake_up, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_up, warn_on_full_buffer=False)

    def serve(self) -> None:
        while self._asked or self._statuses or self._left:
            watched: list[Any] = [self._woken]
            if self._asked:
                watched += [self._control, *([] if self._parent is None else [self._parent])]
            ready, _, _ = select.select(watched, [], [], self._patience())
            self._kill_left()
            if not ready and not self._statuses and not self._left:
                return
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._control in ready:
                self._serve_next()
            elif self._parent in ready:
                self._asked = False

    def _patience(self) -> float | None:
        """Return for how many seconds there may be nothing to do; None for any number."""
        if self._left:
            return max(0.0, min(self._left.values()) - time.monotonic())
        return None if self._statuses else _LINGER

    def _kill_left(self) -> None:
        now = time.monotonic()
        for group in [group for group, due in self._left.items() if due <= now]:
            del self._left[group]
            _signal_group(group, signal.SIGKILL)

    def _serve_next(self) -> None:
        try:
            received = _receive(self._control)
        except ConnectionError:
            received = None
        if received is None:
            self._asked = False
            return
        request, descriptors = received
        if _has_hung_up(self._control):
            # It waited for the answer as long as it does, and has asked another server.
            for descriptor in descriptors:
                os.close(descriptor)
            self._asked = False
            return
        status, status_end = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(status)
            os.close(status_end)
            self._become(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._statuses[pid] = status_end
        process = os.pidfd_open(pid)
        try:
            socket.send_fds(self._control, [pid.to_bytes(_LENGTH, "big")], [process, status])
        except ConnectionError:
            self._asked = False
        os.close(process)
        os.close(status)

    def _reap(self) -> None:
        for pid in list(self._statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                if _signal_group(pid, signal.SIGTERM):
                    self._left[pid] = time.monotonic() + _LEAVING
                end = self._statuses.pop(pid)
                # The process that asked for it may have died.
                with suppress(BrokenPipeError):
                    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(end)

    def _become(self, request: ForkRequest, descriptors: list[int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            if self._parent is not None:
                os.close(self._parent)
            for descriptor in (self._woken, self._wake_up, *self._statuses.values()):
                os.close(descriptor)
            _settle(request, *descriptors[:3])
        except BaseException:
            # Whatever happens, there must not be two servers.
            traceback.print_exc()
            os._exit(1)
        run(request.main, [*descriptors[3:], *request.args])


def _signal_group(group: int, number: signal.Signals) -> bool:
    """Return whether there is such a process group: a worker that leads one has left processes."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _has_hung_up(control: socket.socket) -> bool:
    """Return whether the process that asks has closed its end, with requests that are not read."""
    asked = select.poll()
    asked.register(control, 0)
    return any(found & select.POLLHUP for _, found in asked.poll(0))


def _receive(control: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    length, descriptors, _, _ = socket.recv_fds(control, _LENGTH, _MAX_DESCRIPTORS)
    if not length:
        return None
    size = int.from_bytes(length, "big")
    text = bytearray()
    while len(text) < size:
        part = control.recv(size - len(text))
        if not part:
            return None
        text += part
    return ForkRequest(**json.loads(text)), descriptors


def _settle(request: ForkRequest, stdout: int, stderr: int, directory: int) -> None:
    """Make this process look like a fresh interpreter."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.fchdir(directory)
    for descriptor in (stdout, stderr, directory):
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[:] = request.path
    importlib.invalidate_caches()
    # Python's own generator is seeded again at a fork, NumPy's is not.
    numpy: Any = sys.modules["numpy"]
    numpy.random.seed()
