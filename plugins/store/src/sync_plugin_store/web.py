"""``sync-core serve``: serve a run in a directory to readers over HTTP."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from sync_core.errors import OptionError
from sync_plugin_store.objects import open_below
from sync_tools import Command

__all__ = ["SERVE", "RunServer", "add_arguments", "serve"]

SERVE = Command("serve a directory with a run by HTTP", "sync_plugin_store.web")

# The objects that readers need: no leases, answers or other files.
_SERVED = re.compile(r"/(HEAD|manifests/[0-9a-f]{64}\.json|objects/[0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
# A connection is closed after this long without progress, or with an incomplete request, in
# seconds.
_SILENCE = 60.0
# A connection that reads an object more slowly is closed, in bytes per second.
_SLOWEST = 1 << 16
# At the limit of connections, one that has read too slowly for this long is closed, in seconds.
_STALLED = 0.5
# The most connections, if the limit of open files allows. Each takes a thread and two files.
_MOST = 256
_OTHER_FILES = 64
# The longest time that stopping the server takes, in seconds.
_TICK = 0.1


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD requests for a run's objects, with ranges and conditions."""

    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float] = _SILENCE
    server: RunServer

    def do_GET(self) -> None:
        """Send an object, or a range of it."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Send the headers of an object."""
        self._answer(body=False)

    def handle_one_request(self) -> None:
        """Read a request within a deadline, and answer it."""
        self.server.expect(self.connection, _SILENCE, idle=True)
        super().handle_one_request()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its base names it so
        """Log nothing, since readers send several requests per second."""

    def _has_body(self) -> bool:
        """Return whether the request has a body."""
        lengths = self.headers.get_all("Content-Length", [])
        return bool(
            self.headers.get("Transfer-Encoding")
            or any(length.strip() != "0" for length in lengths)
            # A proxy may read lines as headers that this parser rejects.
            or self.headers.defects
            or self.headers.get_payload()
        )

    def _answer(self, *, body: bool) -> None:
        if self._has_body():
            self._begin(400, 0, {"Connection": "close"})
            return
        found = _SERVED.fullmatch(self.path)
        try:
            if found is None:
                raise FileNotFoundError
            # No links: a process that can write there must not choose files elsewhere.
            file = open_below(self.server.directory, found[1])
        except OSError:
            self._begin(404, 0)
            return
        with file:
            head = found[1] == "HEAD"
            tag = hashlib.sha256(file.read()).hexdigest() if head else Path(found[1]).stem
            headers = {
                "ETag": f'"{tag}"',
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
                # Caches must revalidate the head; all other objects never change.
                "Cache-Control": "no-cache" if head else "public, max-age=31536000, immutable",
            }
            if self.headers.get("If-None-Match") == headers["ETag"]:
                self._begin(304, 0, headers)
                return
            size = os.fstat(file.fileno()).st_size
            wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
            start, stop, status = 0, size, 200
            if wanted is not None:
                start = int(wanted[1])
                stop = min(size, int(wanted[2]) + 1) if wanted[2] else size
                status = 206
                if start >= stop:
                    self._begin(416, 0, {"Content-Range": f"bytes */{size}"})
                    return
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self.server.expect(self.connection, _SILENCE + (stop - start) / _SLOWEST)
            self._begin(status, stop - start, headers)
            if body and start < stop:
                self.wfile.flush()
                self._send(file.fileno(), start, stop)

    def _send(self, file: int, start: int, stop: int) -> None:
        """Send a part of a file with sendfile, without copies through this process."""
        writable, taken = select.poll(), 0
        writable.register(self.connection, select.POLLOUT)
        while start < stop:
            try:
                sent = os.sendfile(self.connection.fileno(), file, start, stop - start)
            except BlockingIOError:
                if writable.poll(1000 * _SILENCE):
                    continue
                sent = 0
            if not sent:
                # The peer reads nothing, or the file was truncated meanwhile.
                self.close_connection = True
                return
            start, taken = start + sent, taken + sent
            if taken >= _STALLED * _SLOWEST:
                taken = 0
                self.server.takes(self.connection)

    def _begin(self, status: int, nbytes: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(nbytes))
        self.end_headers()


class RunServer(ThreadingHTTPServer):
    """Serves a run's objects, and no other files of its directory.

    The number of connections is limited, so that open connections cannot use up this process's file
    descriptors. At the limit, a new connection replaces the one that has been idle for longest, or
    else the one whose read has stalled for longest, or else is refused.

    Args:
        directory: the directory of the run.
        host: the address to listen on; with any but loopback, other hosts can read the weights.
        port: the port; 0 for a free one.
    """

    daemon_threads = True
    # The backlog of connections that wait to be accepted.
    request_queue_size = 128

    def __init__(self, directory: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.directory = directory
        # The deadline of each connection, and when it became idle.
        self._deadlines: dict[socket.socket, float] = {}
        self._idle: dict[socket.socket, float] = {}
        # Connections that read an object, with the time of their last progress, the oldest first.
        self._taking: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            files = 2 * _MOST + _OTHER_FILES
        self._most = max(1, min(_MOST, (files - _OTHER_FILES) // 2))
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The URL of the run."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def expect(self, connection: socket.socket, seconds: float, *, idle: bool = False) -> None:
        """Close a connection unless this is called again in time.

        Args:
            connection: the connection.
            seconds: how long its next step may take.
            idle: whether it is waiting for a request.
        """
        now = time.monotonic()
        with self._lock:
            self._deadlines[connection] = now + seconds
            self._idle.pop(connection, None)
            self._taking.pop(connection, None)
            (self._idle if idle else self._taking)[connection] = now

    def takes(self, connection: socket.socket) -> None:
        """Note that a connection has read a part of an object."""
        with self._lock:
            if self._taking.pop(connection, None) is not None:
                self._taking[connection] = time.monotonic()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection's requests in a thread, if the limit allows one more."""
        with self._lock:
            full = len(self._deadlines) >= self._most
            # The replaced thread ends soon; until then the spare file descriptors are enough.
            replaced = self._least_needed() if full else None
        if replaced is not None:
            _hang_up(replaced)
        elif full:
            self.shutdown_request(request)
            return
        self.expect(request, _SILENCE, idle=True)
        super().process_request(request, client_address)

    def _least_needed(self) -> socket.socket | None:
        """Remove and return the connection to replace; None if all are busy."""
        for found, least in ((self._idle, 0.0), (self._taking, _STALLED)):
            oldest = next(iter(found), None)
            if oldest is not None and time.monotonic() - found[oldest] >= least:
                del found[oldest]
                return oldest
        return None

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._deadlines.pop(request, None)
            self._idle.pop(request, None)
            self._taking.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close the connections whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            late = [one for one, deadline in self._deadlines.items() if deadline < now]
        for connection in late:
            _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, since readers may disconnect at any time."""


def _hang_up(connection: socket.socket) -> None:
    """Shut a connection down, so that its thread ends."""
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serve(directory: str, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve a run over HTTP while the block runs.

    Args:
        directory: the directory of the run.
        host: the address to listen on; with any but loopback, other hosts can read the weights.
        port: the port; 0 for a free one.

    Yields:
        The URL for readers.

    Raises:
        OptionError: the directory does not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, serve(folder) as url:
        ...     url.startswith("http://127.0.0.1:")
        True
    """
    path = Path(directory)
    if not path.is_dir():
        raise OptionError(f"{directory!r} is not a directory; name the one of Sender(…, url=…)")
    with RunServer(path, host, port) as server:
        thread = threading.Thread(
            target=server.serve_forever, args=(_TICK,), name="sync-serve", daemon=True
        )
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Serves a directory that a sender of the scheme 'store' writes to, or a mirror, so that "
        "readers elsewhere can read its run: ranges, conditional requests, and nothing else of the "
        "directory. Ctrl-C ends it."
    )
    parser.add_argument("directory", help="the directory of the run")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8800, help="the port; 0 for a free one (8800)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if not 0 <= arguments.port < 1 << 16:
        parser.error(f"--port must be 0 to 65535, got {arguments.port}")
    with serve(arguments.directory, arguments.host, arguments.port) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return 0
    return 0
