"""Worker processes: forked on Linux, fresh elsewhere."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from sync_plugin_std.local.channel import close_when_forked, closed_with
from sync_plugin_std.workers.fork_server import ForkRequest, receive_reply, send_request

# What arrives is mapped read-only: docs/decisions/0004-zero-copy.md.
_WROTE = (
    " (with zero_copy=True, a write to a parameter does that; type zero_copy=False. So does a "
    "layer or a load= function that writes to a tensor that it is given)"
)


class WorkerProcess(ABC):
    """A process started by `start_process`.

    Attributes:
        pid: its id.
    """

    pid: int

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that killed it; None while it runs, or if unknown."""

    @abstractmethod
    def exited(self, timeout: float) -> bool:
        """Return whether it has ended, at the latest after ``timeout`` seconds."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens when it has ended."""

    def epitaph(self) -> str:
        """Return how it has ended, for messages."""
        code = self.returncode
        if code is None:
            return "has ended"
        if code >= 0:
            return f"exited with code {code}"
        try:
            number = signal.Signals(-code)
        except ValueError:
            return f"killed by signal {-code}"
        wrote = _WROTE if number in (signal.SIGSEGV, signal.SIGBUS) else ""
        return f"killed by {number.name}{wrote}"


class ForkedProcess(WorkerProcess):
    """A process forked by the server.

    Args:
        pid: its id.
        process: a descriptor of the process (pidfd), owned from now on.
        status: a descriptor from which its exit code can be read when it has ended, owned too.
    """

    def __init__(self, pid: int, process: int, status: int) -> None:
        self.pid = pid
        self._process = process
        self._status = status
        self._code: int | None = None
        self._ended = False
        # How many threads wait: a descriptor that one of them uses must not be closed.
        self._waiting = 0
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close, process, status)
        # At the end of this process, a thread may wait for the other one.
        self._close.atexit = False

    @property
    def returncode(self) -> int | None:
        self.exited(0)
        return self._code

    def exited(self, timeout: float) -> bool:
        with self._lock:
            if self._ended:
                return True
            self._waiting += 1
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        try:
            found = bool(ended.poll(max(0.0, timeout) * 1000))
        finally:
            with self._lock:
                self._waiting -= 1
        return found and self._end()

    def send_signal(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._ended:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, number)

    def _end(self) -> bool:
        with self._lock:
            if not self._ended:
                # Empty when the server has died: the status is unknown then.
                code = os.read(self._status, 16)
                self._code = int(code) if code else None
                self._ended = True
            if not self._waiting:
                self._close()
        return True


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# `-m` would import from the current directory first, and could not find a package that only this
# process's sys.path leads to.
_BOOT = (
    "import sys; main, fds, args = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]); "
    "given, sys.path[:] = sys.argv[4:4 + fds + args], sys.argv[4 + fds + args:]; "
    "del sys.argv[1:]; from sync_plugin_std.workers.fork_server import run; "
    "run(main, [*map(int, given[:fds]), *given[fds:]])"
)


def absolute_path() -> list[str]:
    """Return ``sys.path`` with absolute entries, for a process in another directory."""
    return [str(Path(entry).absolute()) for entry in sys.path]


class FreshProcess(WorkerProcess):
    """A fresh interpreter; see `start_process` for the arguments."""

    def __init__(self, main: str, args: Sequence[str], fds: Sequence[int]) -> None:
        counts = [str(len(fds)), str(len(args))]
        given = [*map(str, fds), *args]
        command = [sys.executable, "-c", _BOOT, main, *counts, *given, *absolute_path()]
        # Blocked, and inherited so, until the child ignores it: Ctrl-C is for the parent.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def exited(self, timeout: float) -> bool:
        try:
            self._process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            return False
        return True

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


# No garbage is looked for while torch is loaded: a quarter of the time that this takes.
_BOOT_SERVER = (
    "import gc, sys; gc.disable(); "
    "control, load = int(sys.argv[1]), sys.argv[2]; sys.path[:] = sys.argv[3:]; del sys.argv[1:]; "
    "from sync_plugin_std.workers.fork_server import main; main(control, load)"
)

# Loading torch takes seconds, and the machine may be busy.
_PATIENCE = 120.0


class ForkServer:
    """A server of this process's own, which ends with it, or when it has nothing to do.

    Args:
        load: the modules that it imports before it forks, separated by commas.
        path: its ``sys.path``.
    """

    def __init__(self, load: str, path: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        close_when_forked(self._control, theirs)
        self._control.settimeout(_PATIENCE)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", _BOOT_SERVER, str(theirs.fileno()), load, *path],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                ],
                # Ctrl-C is for this process, and the other one cannot ignore it at once.
                setsigmask=[signal.SIGINT],
            )

    def fork(self, request: ForkRequest, fds: Sequence[int]) -> ForkedProcess:
        """Have a process forked.

        Raises:
            ConnectionError: the server has ended.
        """
        with ExitStack() as opened:
            given = [closed_with(opened, _copy(standard)) for standard in (1, 2)]
            given.append(closed_with(opened, os.open(".", os.O_RDONLY | os.O_DIRECTORY)))
            try:
                send_request(self._control, request, [*given, *fds])
                return ForkedProcess(*receive_reply(self._control))
            except TimeoutError as error:
                raise ConnectionError(f"no answer within {_PATIENCE:g} s") from error

    def close(self) -> None:
        """Let it end as soon as nothing lives that it has forked."""
        self._control.close()

    def reaped(self) -> bool:
        """Return whether it has ended, and is not a zombie either."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            # Code that waits for any child has taken its status.
            return True


def _copy(standard: int) -> int:
    try:
        return os.dup(standard)
    except OSError:
        # A process may have closed its standard output.
        return os.open(os.devnull, os.O_WRONLY)


# Variables that the interpreter or a library reads when it is loaded; all others can be changed
# in a process that runs.
_READ_WHEN_LOADED = (
    *("LD_", "MALLOC_", "GLIBC_", "PYTHON", "TORCH", "PYTORCH", "ATEN_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
)


def fork(request: ForkRequest, fds: Sequence[int]) -> ForkedProcess:
    """Have a process forked; see `start_process`."""
    return _current.fork(request, fds)


def fork_server_pids() -> set[int]:
    """The processes of the fork server and of those that it replaced, which are not workers."""
    return _current.pids


class _Current:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._fits: object = None
        self._closed: list[ForkServer] = []

    @property
    def pids(self) -> set[int]:
        current = [] if self._server is None else [self._server]
        return {server.pid for server in [*current, *self._closed]}

    def fork(self, request: ForkRequest, fds: Sequence[int]) -> ForkedProcess:
        with self._lock:
            self._closed = [server for server in self._closed if not server.reaped()]
            load, inherited = _to_load(), _inherited()
            try:
                if self._server is not None and self._fits == (load, inherited):
                    # It may have had nothing to do for a while, and ended; the next one does it.
                    with suppress(ConnectionError):
                        return self._server.fork(request, fds)
                self.end()
                self._server, self._fits = ForkServer(load, request.path), (load, inherited)
                return self._server.fork(request, fds)
            except BaseException as error:
                # After Ctrl-C, the next request would read the reply to this one.
                self.end()
                if not isinstance(error, ConnectionError):
                    raise
                raise ChildProcessError(
                    "the process that forks workers ended; what it said is on standard error"
                ) from error

    def end(self) -> None:
        if self._server is not None:
            self._server.close()
            self._closed.append(self._server)
            self._server = None

    def forget(self) -> None:
        """Leave the server to the process that this one was forked from."""
        self._lock, self._server, self._closed = threading.Lock(), None, []


_preloaded = ["sync_core:Receiver"]


def preload(module: str) -> None:
    """Have worker processes that are forked from now on begin with a module already imported.

    For modules that workers need and that take long to import. It costs their import once, in the
    process that forks workers; where there is none, it does nothing.

    Args:
        module: its name, such as ``"sync_collector.collector_worker"``; or ``"sync_core:Receiver"``
            for what a lazy package imports when that name is used.
    """
    if module not in _preloaded:
        _preloaded.append(module)


def _to_load() -> str:
    """The modules that workers need: also tensordict, as slow as torch, if this process has it."""
    return ",".join([*_preloaded, *(["tensordict"] if "tensordict" in sys.modules else [])])


def _inherited() -> object:
    """Return the settings that a process inherits from its parent for good."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(_READ_WHEN_LOADED)}
    limits = [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    ]
    cores = os.sched_getaffinity(0)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    return variables, limits, cores, priority, os.geteuid()


_current = _Current()
os.register_at_fork(after_in_child=_current.forget)


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
    request = ForkRequest(main, list(args), absolute_path(), dict(os.environ))
    return fork(request, fds)
