"""Serves the status of a sender: JSON over HTTP, on this machine only."""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any, Self

from sync_core import Sender, SendReport, WorkerResult
from sync_core.transports import uninterrupted
from sync_plugin_std.local import close_when_forked

_log = logging.getLogger("sync_core")
# The time limit of a request, and then of its answer, in seconds.
_DEADLINE = 1.0
# The most open connections; further ones close the oldest.
_MOST = 64
# How long to wait before accepting again when the process has no free descriptor, in seconds.
_PAUSE = 1.0
# A browser sends up to 2 KB of headers, plus cookies.
_LONGEST_REQUEST = 8192
# After an answer, up to this number of further bytes is read: the reader may lose the answer if the
# connection closes before that.
_LONGEST_REST = 1 << 16


@dataclass(eq=False, slots=True)
class _Reader:
    """A connection: reads a request, sends the answer, and drains the rest."""

    connection: socket.socket
    deadline: float
    request: bytes = b""
    answer: memoryview | None = None
    rest: int = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker's status, as its sender sees it.

    Args:
        worker_id: the worker.
        state: its state; see `WorkerState`.
        state_seconds: how long it has been in this state, in seconds.
        version: the newest version that it has acknowledged; 0 for none.
        lag: how many versions it is behind the sender.
        failures: the number of consecutive failed sends.
        error: the last failure, unless it has acknowledged the newest version since.
        last: the fields of its `WorkerResult` in the last send to it.
    """

    worker_id: int
    state: str
    state_seconds: float
    version: int
    lag: int
    failures: int
    error: str | None
    last: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class SenderView:
    """The status of a sender and its workers, as ``sync-core watch`` shows it.

    Args:
        scheme: the name of the scheme.
        model_id: the model's name.
        process: the id of the sender's process.
        version: the newest version sent; 0 before the first.
        sends: the number of finished sends.
        failed_sends: the number of sends in which a worker failed.
        nbytes: bytes delivered to all workers in these sends.
        last: the fields of the last `SendReport` except its workers, and ``ago_seconds``; None
            before the first.
        workers: the status of each worker.
    """

    scheme: str
    model_id: str
    process: int
    version: int
    sends: int
    failed_sends: int
    nbytes: int
    last: dict[str, Any] | None
    workers: list[WorkerView]


class StatusServer:
    """Serves the status of a sender to readers such as ``sync-core watch``, on its own thread.

    It listens on the loopback interface, on a free port, and answers one ``GET`` request of each
    connection. Slow or silent connections do not delay others. Requests change nothing. The server
    ends when its sender or the server itself is closed.

    Args:
        sender: the sender; it is not kept alive.

    Raises:
        ClosedError: the sender is closed.
        TypeError: the object is not a sender.

    Example:
        >>> import torch
        >>> from sync_core import Sender
        >>> with Sender("none", torch.nn.Linear(4, 2), num_workers=1) as sender:
        ...     server = StatusServer(sender)
        ...     sender.send().version
        ...     server.view().sends, server.address.startswith("http://127.0.0.1:")
        1
        (1, True)
    """

    def __init__(self, sender: Sender) -> None:
        if not isinstance(sender, Sender):
            raise TypeError(
                f"sender must be a Sender, got {sender!r}; type StatusServer(collector.sender) for "
                "a Collector, whose sender is None as long as it has no weights to send"
            )
        self._sender = weakref.ref(sender)
        self._process = os.getpid()
        self._path = f"/{secrets.token_urlsafe(16)}"
        self._last: tuple[float, SendReport] | None = None
        self._results: dict[int, WorkerResult] = {}
        self._sends = self._failed_sends = self._nbytes = 0
        self._unsubscribe = sender.on_report(self._take)
        with uninterrupted():
            self._listener = socket.create_server(("127.0.0.1", 0))
            close_when_forked(self._listener)
            self._listener.setblocking(False)  # the connection may close before it is accepted
            self._ended, self._end = socket.socketpair()
            self._thread = threading.Thread(target=self._serve, name="sync-status", daemon=True)
            self._thread.start()
            try:
                self._unregister = sender.on_close(self._stop)
            except BaseException:
                self._stop()
                raise
        self._address = f"http://127.0.0.1:{self._listener.getsockname()[1]}{self._path}"

    @property
    def address(self) -> str:
        """The address of the status: ``http://127.0.0.1:``, a port, and a random token."""
        return self._address

    def close(self) -> None:
        """Close all connections, after the answer that is being sent.

        Does nothing in a process that was forked from the server's.
        """
        if os.getpid() != self._process:
            return
        self._unsubscribe()
        self._stop()
        self._unregister()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _stop(self) -> None:
        # Shut down first: a process forked from this one holds the socket too.
        with suppress(OSError):  # already closed
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _take(self, report: SendReport) -> None:
        self._sends += 1
        self._failed_sends += any(result.error for result in report.workers.values())
        self._nbytes += report.nbytes
        sent = {i: result for i, result in report.workers.items() if not result.skipped}
        # Replaced, not changed: the server's thread reads the dict.
        self._results = self._results | sent
        self._last = time.monotonic(), report

    def view(self) -> SenderView:
        """Return the status at this moment.

        Raises:
            ReferenceError: the sender is gone.
        """
        sender = self._sender()
        if sender is None:
            raise ReferenceError("the sender is gone")
        now, version, last, results = time.monotonic(), sender.version, self._last, self._results
        return SenderView(
            scheme=sender.scheme,
            model_id=sender.model_id,
            process=os.getpid(),
            version=version,
            sends=self._sends,
            failed_sends=self._failed_sends,
            nbytes=self._nbytes,
            last=None if last is None else _summary(last[1], now - last[0]),
            workers=[
                WorkerView(
                    worker_id=worker_id,
                    state=str(worker.state),
                    state_seconds=now - worker.since,
                    version=worker.version,
                    lag=max(0, version - worker.version),
                    failures=worker.failures,
                    error=None if worker.error is None else str(worker.error),
                    last=results[worker_id].as_dict() if worker_id in results else None,
                )
                for worker_id, worker in sender.workers.items()
            ],
        )

    def _serve(self) -> None:
        readers: dict[socket.socket, _Reader] = {}
        with self._listener, self._ended, DefaultSelector() as selector:
            selector.register(self._ended, EVENT_READ)
            selector.register(self._listener, EVENT_READ)
            paused_until = math.inf
            while True:
                moments = paused_until, *(reader.deadline for reader in readers.values())
                timeout = min(moments) - time.monotonic()
                ready = selector.select(None if timeout == math.inf else max(0.0, timeout))
                found = {key.fileobj for key, _ in ready}
                if self._ended in found:
                    break
                now = time.monotonic()
                for connection in [c for c in readers if c in found or readers[c].deadline <= now]:
                    reader = readers[connection]
                    if reader.deadline > now and self._continue(reader):
                        selector.modify(connection, EVENT_WRITE if reader.answer else EVENT_READ)
                    else:
                        _drop(readers.pop(connection), selector)
                if paused_until <= now:
                    paused_until = math.inf
                    selector.register(self._listener, EVENT_READ)
                elif self._listener in found and not self._accept(readers, selector):
                    paused_until = now + _PAUSE
                    selector.unregister(self._listener)
            for reader in readers.values():
                if reader.answer:
                    with suppress(OSError):
                        reader.connection.settimeout(max(0.0, reader.deadline - time.monotonic()))
                        reader.connection.sendall(reader.answer)
                _drop(reader, selector)
            # As with the other socket; macOS has no shutdown for listeners.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, readers: dict[socket.socket, _Reader], selector: DefaultSelector) -> bool:
        """Accept a connection, if there is one; return False if no descriptor is free."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return True
        except OSError:
            return False
        connection.setblocking(False)
        if len(readers) == _MOST:
            _drop(readers.pop(next(iter(readers))), selector)
        readers[connection] = _Reader(connection, time.monotonic() + _DEADLINE)
        selector.register(connection, EVENT_READ)
        return True

    def _continue(self, reader: _Reader) -> bool:
        """Read or send without waiting; return False when the connection is finished."""
        try:
            if reader.answer:
                reader.answer = reader.answer[reader.connection.send(reader.answer) :]
                if not reader.answer:
                    reader.connection.shutdown(socket.SHUT_WR)
                return True
            part = reader.connection.recv(_LONGEST_REQUEST)
            if reader.answer is not None:
                reader.rest += len(part)
                return bool(part) and reader.rest <= _LONGEST_REST
            reader.request += part
            if (
                part
                and b"\r\n\r\n" not in reader.request
                and len(reader.request) < _LONGEST_REQUEST
            ):
                return True
            reader.answer = memoryview(self._answer(reader.request))
            reader.deadline = time.monotonic() + _DEADLINE
        except BlockingIOError:
            return True
        except Exception as error:
            _log.debug("a request for the status was not answered: %r", error)
            return False
        return True

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0]
        if not hmac.compare_digest(path, self._path.encode()):
            status, content = "403 Forbidden", {"error": "this address has another token"}
        elif method != b"GET":
            status, content = "405 Method Not Allowed", {"error": "the status is read by GET"}
        else:
            try:
                status, content = "200 OK", asdict(self.view())
            except ReferenceError as error:
                status, content = "410 Gone", {"error": str(error)}
        body = json.dumps(content).encode()
        head = (
            f"HTTP/1.0 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\n\r\n"
        )
        return head.encode() + body


def _drop(reader: _Reader, selector: DefaultSelector) -> None:
    selector.unregister(reader.connection)
    # Shut down first: a process forked from this one holds the socket too.
    with suppress(OSError):
        reader.connection.shutdown(socket.SHUT_RDWR)
    reader.connection.close()


def _summary(report: SendReport, ago_seconds: float) -> dict[str, Any]:
    values = report.as_dict()
    del values["workers"]
    return values | {"ago_seconds": ago_seconds}
