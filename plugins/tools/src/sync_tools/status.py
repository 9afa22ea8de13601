"""A server for the status of a sender: JSON over HTTP, on this machine only."""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Self

from sync_core import Sender, SendReport, WorkerResult
from sync_core.transports import uninterrupted

_log = logging.getLogger("sync_core")
# A request, and then its answer, may take this long, in seconds; others wait in the meantime.
_DEADLINE = 1.0
# Before another connection is accepted, in seconds, where the process has no descriptor left.
_PAUSE = 1.0
# A browser sends up to 2 KB of headers, beside cookies.
_LONGEST_REQUEST = 8192


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, as its sender sees it.

    Args:
        worker_id: the worker.
        state: its state; see `WorkerState`.
        state_seconds: how long it has been in it.
        version: the newest version that it has acknowledged; 0 for none.
        lag: how many versions the sender is ahead of it.
        failures: how many sends it has failed in a row.
        error: the last failure, if it has not acknowledged the newest version since.
        last: the fields of its `WorkerResult` in the last send that was meant for it.
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
    """A sender and its workers, as ``sync-core watch`` shows them.

    Args:
        scheme: the name of the scheme.
        model_id: the model's name.
        process: the id of the sender's process.
        version: the newest version sent; 0 before the first.
        sends: how many sends have ended.
        failed_sends: how many of them some worker failed.
        nbytes: bytes delivered by them to all workers together.
        last: the fields of the last `SendReport` but its workers, and ``ago_seconds``; None before
            the first.
        workers: each worker.
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
    """Serves the status of a sender to readers such as ``sync-core watch``, in a thread.

    It listens on the loopback interface, on a free port, and answers ``GET`` requests one after
    the other. Requests change nothing. The server ends with its sender, or when it is closed.

    Args:
        sender: the sender; it is not kept alive.

    Raises:
        ClosedError: the sender is closed.
        TypeError: it is not a sender.

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
            self._listener.setblocking(False)  # a connection may be gone before it is accepted
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
        """Refuse further connections; a request in progress is answered first.

        In a process that was forked from the server's, this does nothing.
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
        # Closing is not enough: a process that was forked from this one has the socket, too.
        with suppress(OSError):  # it is closed already
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _take(self, report: SendReport) -> None:
        self._sends += 1
        self._failed_sends += any(result.error for result in report.workers.values())
        self._nbytes += report.nbytes
        sent = {i: result for i, result in report.workers.items() if not result.skipped}
        # The thread sees the dict before or after, never one that changes.
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
        with self._listener, self._ended, DefaultSelector() as selector:
            selector.register(self._ended, EVENT_READ)
            selector.register(self._listener, EVENT_READ)
            while self._ended not in {key.fileobj for key, _ in selector.select()}:
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError:
                    selector.unregister(self._listener)
                    if selector.select(_PAUSE):
                        break
                    selector.register(self._listener, EVENT_READ)
                    continue
                with connection:
                    try:
                        self._answer(connection)
                    except Exception as error:
                        _log.debug("a request for the status was not answered: %r", error)
            # As with the other socket; macOS has no such call for listeners.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)

    def _answer(self, connection: socket.socket) -> None:
        method, _, rest = _first_line(connection).partition(b" ")
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
        connection.settimeout(_DEADLINE)
        connection.sendall(head.encode() + body)


def _first_line(connection: socket.socket) -> bytes:
    """Read a request, and return its first line.

    Raises:
        TimeoutError: it was not there by the deadline.
    """
    deadline = time.monotonic() + _DEADLINE
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _LONGEST_REQUEST:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the request has no end")
        connection.settimeout(remaining)
        part = connection.recv(_LONGEST_REQUEST - len(request))
        if not part:
            break
        request += part
    return request.partition(b"\r\n")[0]


def _summary(report: SendReport, ago_seconds: float) -> dict[str, Any]:
    values = report.as_dict()
    del values["workers"]
    return values | {"ago_seconds": ago_seconds}
