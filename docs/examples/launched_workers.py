"""A worker group whose workers are started by any command line: ssh, srun, docker run.

    python docs/examples/launched_workers.py
    TRAINER_HOST=10.0.0.5 python docs/examples/launched_workers.py ssh 'node{worker_id}' '{worker}'
    python docs/examples/launched_workers.py srun --ntasks=1 --nodes=1 '{worker}'
    python docs/examples/launched_workers.py docker run --rm -i --network=host IMAGE '{worker}'

Calls and results use the command's standard input and output, so they need no open port. When the
trainer ends, the input ends. The other machine needs this file, its imports, and the same versions
of Python and torch.
"""

from __future__ import annotations

import os
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, ClassVar

import torch
from torch import nn

from sync_core import Address, Receiver, Sender
from sync_plugin_std.workers import (
    CallOutcome,
    LaunchedGroup,
    Launcher,
    RemoteCall,
    close_hosted,
    pickle_factory,
)

Parts = Sequence[bytes | bytearray | memoryview]

# The command that starts a worker on a machine like this one.
PROGRAM = (sys.executable, str(Path(__file__).resolve()), "--worker")
# How long a worker may take to leave its call after its trainer is gone, in seconds; an estimate.
GRACE = 5.0
_LENGTH = struct.Struct("!Q")


class CommandGroup(LaunchedGroup["CommandWorker"]):
    """Objects in processes that a command line starts, here or on other machines.

    Args:
        factory: makes the object that a worker hosts, from the worker's id.
        num_workers: the number of workers.
        command: the command line. ``"{worker}"`` stands for the worker's program: as a separate
            argument it becomes several arguments, and within an argument it is quoted for a shell.
            ``"{worker_id}"`` stands for the worker's id.
        program: the worker's program, if it has another path on the other machine.
        timeout: deadline in seconds for workers to start or to stop.

    Raises:
        ValueError: the command has no ``"{worker}"``.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"parallel", "cross_process", "cross_host", "restart", "add"}
    )

    def __init__(
        self,
        factory: Callable[[int], Any],
        num_workers: int,
        *,
        command: Sequence[str] = ("{worker}",),
        program: Sequence[str] = PROGRAM,
        timeout: float = 60.0,
    ) -> None:
        if not any("{worker}" in part for part in command):
            raise ValueError(f"command must have '{{worker}}' in one of its parts, got {command!r}")
        make = partial(expand, tuple(command), tuple(program))
        super().__init__(CommandLauncher(factory, make), num_workers, timeout=timeout)


def expand(command: Sequence[str], program: Sequence[str], worker_id: int) -> list[str]:
    """Return the command line of one worker.

    Example:
        >>> expand(["ssh", "node{worker_id}", "exec {worker}"], ["python3", "my file.py"], 2)
        ['ssh', 'node2', "exec python3 'my file.py'"]
        >>> expand(["env", "{worker}"], ["python3", "my file.py"], 2)
        ['env', 'python3', 'my file.py']
    """
    line: list[str] = []
    for part in command:
        if part == "{worker}":
            line += program
        else:
            text = part.replace("{worker}", shlex.join(program))
            line.append(text.replace("{worker_id}", str(worker_id)))
    return line


class CommandLauncher(Launcher["CommandWorker"]):
    """Starts and ends the commands of a worker group.

    Args:
        factory: see `CommandGroup`.
        command: the command line of a worker, by its id.
    """

    def __init__(self, factory: Callable[[int], Any], command: Callable[[int], list[str]]) -> None:
        self._factory = factory
        self._command = command

    def launch(self, worker_ids: Sequence[int]) -> Iterator[CommandWorker]:
        """Start workers, without waiting for them."""
        pickled = pickle_factory(self._factory, next(iter(worker_ids), 0))
        for worker_id in worker_ids:
            yield CommandWorker(worker_id, self._command(worker_id), self._factory, pickled)

    def end(self, workers: Collection[CommandWorker], timeout: float) -> None:
        """Close the input of the commands, and kill those that do not end in time."""
        deadline = time.monotonic() + timeout
        for worker in workers:
            worker.ask_to_end()
        for worker in workers:
            worker.wait(deadline - timeout / 4 - time.monotonic())
            worker.kill()
        for worker in workers:
            worker.wait(deadline - time.monotonic())

    def explain_delay(self, worker: CommandWorker) -> str:
        """Return advice about a worker that was not ready in time."""
        return f"; give a longer timeout, or try by hand: {shlex.join(worker.command)}"


class CommandWorker:
    """One command, and its unanswered calls.

    Args:
        worker_id: the worker's id.
        command: the command line.
        factory: makes the hosted object; named in errors.
        pickled: the pickled factory.
    """

    def __init__(
        self, worker_id: int, command: list[str], factory: Callable[[int], Any], pickled: Parts
    ) -> None:
        self.worker_id = worker_id
        self.command = command
        self._lock = threading.Lock()
        self._calls: list[RemoteCall] = []
        self._lost = ""
        self._ending = False
        self._outbox: SimpleQueue[Parts | None] = SimpleQueue()
        # In its own session: only the trainer handles Ctrl-C, and one signal reaches all processes.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        name = f"worker {worker_id} of a command"
        self._reader = threading.Thread(target=self._read, name=f"{name}, reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}, writer", daemon=True)
        self._outbox.put([str(worker_id).encode()])
        self.ready: Future[None] = self._post(RemoteCall(worker_id, factory), pickled)
        self._writer.start()
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Return whether the worker can still run calls."""
        return not self._ending and not self._lost and self._process.poll() is None

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """Call a function with the object that the worker hosts."""
        call = RemoteCall(self.worker_id, function)
        message = call.pickle(args, kwargs)
        return call.future if message is None else self._post(call, message)

    def ask_to_end(self) -> None:
        """Let the call in progress finish, and start no other."""
        self._ending = True
        self._outbox.put(None)

    def kill(self) -> None:
        """Kill the command and the processes that it has started on this machine."""
        # The system does not reuse the id before poll() has read the exit code.
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Wait until the command and all calls have ended, or for the timeout."""
        if self._reader is not threading.current_thread():
            self._reader.join(max(0.0, timeout))

    def _post(self, call: RemoteCall, message: Parts) -> Future[Any]:
        with self._lock:
            lost = self._lost
            if not lost:
                self._calls.append(call)
                self._outbox.put(message)
        if lost:
            call.lose(
                f"{lost}, so it cannot run {call.name}; restart({call.worker_id}) replaces it"
            )
        return call.future

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            while not self._ending and (message := self._outbox.get()) is not None:
                write(self._process.stdin, message)
        with suppress(OSError):
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (reply := read(self._process.stdout)) is not None:
            with self._lock:
                call = self._calls.pop(0)
            call.finish(CallOutcome.unpickle(reply))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        self.kill()
        code = self._process.wait()
        self._outbox.put(None)
        self._writer.join()
        self._process.stdout.close()
        self._lose("was stopped" if self._ending else f"{self.command[0]} ended with code {code}")

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._lost = reason
            calls, self._calls = self._calls, []
        for call in calls:
            call.lose(f"{reason} before {call.name} had ended")


def write(file: BinaryIO, parts: Parts) -> None:
    """Write a message: the number of parts, and each part with its length."""
    file.write(_LENGTH.pack(len(parts)))
    for part in parts:
        file.write(_LENGTH.pack(len(part)))
        file.write(part)
    file.flush()


def read(file: BinaryIO) -> list[bytearray] | None:
    """Return the next message; None at the end of the input."""
    try:
        return [_read_exactly(file, _read_length(file)) for _ in range(_read_length(file))]
    except (EOFError, OSError):
        return None


def _read_length(file: BinaryIO) -> int:
    (length,) = _LENGTH.unpack(_read_exactly(file, _LENGTH.size))
    return int(length)


def _read_exactly(file: BinaryIO, size: int) -> bytearray:
    content = bytearray(size)
    missing = memoryview(content)
    while missing:
        count = file.readinto(missing)  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        missing = missing[count:]
    return content


def serve() -> None:
    """Run a worker: make the object, and run calls on it until the input ends."""
    # The output of the worker's code goes to standard error, so that it does not mix with the
    # answers. Its input is empty.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    messages: SimpleQueue[list[bytearray] | None] = SimpleQueue()
    ended = threading.Event()

    def listen() -> None:
        while (message := read(requests)) is not None:
            messages.put(message)
        ended.set()
        messages.put(None)
        # Even a long call must not keep a worker alive without its trainer.
        threading.Event().wait(GRACE)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    first, factory = messages.get(), messages.get()
    if first is None or factory is None:
        return
    worker_id = int(first[0])
    made = CallOutcome.of_pickled(factory, worker_id)
    write(answers, made.without_value().pickle())
    if made.failed:
        return
    while (message := messages.get()) is not None and not ended.is_set():
        write(answers, CallOutcome.of_pickled(message, made.value).pickle())
    close_hosted(worker_id, made.value)


def receive(model: nn.Module, address: Address, versions: int) -> float:
    """Commit some versions in a worker; return the sum of its model's weights."""
    with Receiver(address, model) as receiver:
        for _ in range(versions):
            receiver.receive()
    return sum(parameter.sum().item() for parameter in model.parameters())


def main(command: Sequence[str]) -> None:
    """Send three versions to two workers that a command line has started."""
    policy = nn.Linear(4, 2)
    # The address under which other machines reach this one.
    host = os.environ.get("TRAINER_HOST", "127.0.0.1")
    with (
        CommandGroup(lambda _: nn.Linear(4, 2), 2, command=command) as group,
        Sender("dist", policy, num_workers=2, host=host) as sender,
    ):
        sums = [group.call(i, receive, sender.address(i), 3) for i in group.worker_ids]
        for _ in range(3):
            with torch.no_grad():
                policy.weight.add_(1.0)
            report = sender.send()
            print(f"version {report.version}: workers {report.updated}")
        expected = sum(parameter.sum().item() for parameter in policy.parameters())
        print("the workers have it:", [abs(each.result() - expected) < 1e-3 for each in sums])


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--worker"] else main(sys.argv[1:] or ["{worker}"])
