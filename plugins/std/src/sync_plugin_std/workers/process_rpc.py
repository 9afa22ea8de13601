"""Calls over a socket to a worker process: framing, sending, answers."""

from __future__ import annotations

import itertools
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from multiprocessing import current_process
from queue import SimpleQueue
from typing import Any

from sync_plugin_std.local.channel import close_when_forked
from sync_plugin_std.workers import CallOutcome, RemoteCall, start_process
from sync_plugin_std.workers.framing import Part, encode, receive_message
from sync_plugin_std.workers.process_worker import Startup


class PendingCalls:
    """Calls that end in the order in which they come, or all at once when the worker is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, RemoteCall] = {}
        self._lost: str | None = None

    def add(self, call: RemoteCall, post: Callable[[int], None]) -> None:
        """A call, which ``post`` hands to the worker by its number and without blocking."""
        # One lock around both, so that outcomes come back in the order of the calls.
        with self._lock:
            lost = self._lost
            if lost is None:
                number = next(self._numbers)
                self._calls[number] = call
                post(number)
        if lost is not None:
            advice = (
                f"restart({call.worker_id}) of its group replaces it, and so does a Collector with "
                "on_worker_failure='restart'"
            )
            call.lose(f"{lost}, so it cannot run {call.name}; {advice}")

    def finish(self, number: int, outcome: CallOutcome) -> None:
        """End a call, unless the worker was given up for lost in the meantime."""
        with self._lock:
            call = self._calls.get(number)
            # Ctrl-C kept those before it from the worker.
            self._calls = {later: each for later, each in self._calls.items() if later > number}
        if call is not None:
            call.finish(outcome)

    def lose(self, reason: str, *, running: bool) -> None:
        """Fail every call, and each one that is added from now on.

        Args:
            reason: how the worker ended: ``killed by SIGKILL``.
            running: whether that was in the middle of the oldest call.
        """
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            calls, self._calls = self._calls, {}
        moment = "while running" if running else "before it could run"
        for call in calls.values():
            call.lose(f"{reason} {moment} {call.name}")
            moment = "before it could run"


class Outbox:
    """Sends messages in order; `put` never blocks.

    A short message goes out in the caller's thread when nothing is ahead of it, which saves a
    thread switch. Once the other end is gone, messages are dropped; the reader notices.

    Args:
        sock: where to send; its owner closes it, after `join`.
        name: of the thread.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._behind = 0
        self._backlog: SimpleQueue[list[Part]] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def put(self, number: int, parts: Sequence[Part]) -> None:
        """Send the message now, or as soon as those before it are sent."""
        pieces = encode(number, parts)
        with self._lock:
            if not self._behind and len(pieces) == 1:
                unsent = pieces[0][self._send_now(pieces[0]) :]
                if not unsent:
                    return
                pieces = [unsent]
            self._behind += 1
            self._backlog.put(pieces)

    def join(self) -> None:
        """Wait until all is sent, or the other end is gone; `put` is not called after this."""
        self._backlog.put([])
        self._thread.join()

    def _send_now(self, piece: Part) -> int:
        try:
            return self._socket.send(piece, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(piece)

    def _write(self) -> None:
        with suppress(OSError):
            while self._write_next():
                pass

    def _write_next(self) -> bool:
        pieces = self._backlog.get()
        for piece in pieces:
            self._socket.sendall(piece)
        with self._lock:
            self._behind -= 1
        return bool(pieces)


_MAIN = "sync_plugin_std.workers.process_worker:main"

# From the end of its connection to the end of a process: closing a GPU takes a moment.
_BURIAL = 5.0


class Child:
    """One process, with a connection for calls and a lifeline that tells it of this one's end.

    Neither side can block the other: calls wait in an outbox while the process does not read, and
    a thread reads its outcomes at all times.

    Args:
        worker_id: given to the factory, and named by errors.
        factory: makes the object.
        pickled_factory: the same, as it travels.
        torch_threads: threads that torch is to use.
    """

    def __init__(
        self,
        worker_id: int,
        factory: Callable[[int], Any],
        pickled_factory: list[bytearray],
        torch_threads: int,
    ) -> None:
        self.worker_id = worker_id
        self._ending = False
        self._pending = PendingCalls()
        with ExitStack() as opened, ExitStack() as theirs:
            ends = []
            for _ in range(2):
                mine, its = socket.socketpair()
                opened.enter_context(mine)
                theirs.enter_context(its)
                # Before anything is started: a process forked from this one must not keep the
                # worker alive after this one has died, nor hide from this one that it has died.
                close_when_forked(mine, its)
                ends.append((mine, its))
            (self._calls, calls), (self._lifeline, lifeline) = ends
            self._process = start_process(_MAIN, fds=[calls.fileno(), lifeline.fileno()])
            opened.pop_all()
        self._outbox = Outbox(self._calls, f"sync worker {worker_id} writer")
        startup = Startup(worker_id, bytes(current_process().authkey), torch_threads)
        self._outbox.put(0, [pickle.dumps(startup)])
        self.ready: Future[None] = self._post(RemoteCall(worker_id, factory), pickled_factory)
        self._reader = threading.Thread(
            target=self._read, name=f"sync worker {worker_id} reader", daemon=True
        )
        self._reader.start()

    @property
    def alive(self) -> bool:
        return not self._ending and not self._process.exited(0)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        call = RemoteCall(self.worker_id, function)
        return self._post(call, call.pickle(args, kwargs))

    def ask_to_end(self) -> None:
        """Let the call in progress finish, and no other begin."""
        self._ending = True
        with suppress(OSError):
            self._lifeline.send(b"\0", socket.MSG_DONTWAIT)
            self._calls.shutdown(socket.SHUT_WR)

    def terminate(self) -> None:
        """Send SIGTERM, which a stopped process (SIGSTOP) does not feel."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.send_signal(signal.SIGKILL)

    def exited(self, timeout: float) -> bool:
        """Return whether the process has ended, at the latest after ``timeout`` seconds."""
        return self._process.exited(timeout)

    def join(self, timeout: float) -> None:
        """After the process has ended: wait until every call has ended too and nothing is left."""
        # Something that the process has forked may hold its end open.
        with suppress(OSError):
            self._calls.shutdown(socket.SHUT_RDWR)
        if self._reader is not threading.current_thread():
            self._reader.join(max(0.0, timeout))

    def _post(self, call: RemoteCall, message: list[bytearray] | None) -> Future[Any]:
        if message is not None:
            self._pending.add(call, lambda number: self._outbox.put(number, message))
        return call.future

    def _read(self) -> None:
        while self._read_next():
            pass
        if not self.exited(_BURIAL):
            self.kill()
            self._process.exited(_BURIAL)
        self._outbox.join()
        self._calls.close()
        self._lifeline.close()
        reason = "was stopped" if self._ending else self._process.epitaph()
        # A worker that was asked to end and did so has finished what it was running.
        finished = self._ending and self._process.returncode == 0
        self._pending.lose(reason, running=not finished)

    def _read_next(self) -> bool:
        reply = receive_message(self._calls)
        if reply is None:
            return False
        number, parts = reply
        self._pending.finish(number, CallOutcome.unpickle(parts))
        return True
