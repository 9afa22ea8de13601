"""A web server of a run that fails as networks and services do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sync_plugin_store.web import RunServer


class Faults:
    """The faults of a server, and the requests that it got.

    Attributes:
        refuse: answers that are an error; counts down.
        status: the status of these errors.
        cut: bodies of a megabyte or more that end after half of their bytes; counts down.
        asked: requests, by path.
        sent: bytes of bodies of objects.
    """

    def __init__(self) -> None:
        self.refuse = 0
        self.status = 503
        self.cut = 0
        self.asked = Counter[str]()
        self.ranges: list[str] = []
        self.sent = 0
        self.lock = threading.Lock()


@contextmanager
def faulty(directory: Path) -> Iterator[tuple[str, Faults]]:
    """Serve a directory; the URL, and the faults to choose."""
    faults = Faults()
    with RunServer(directory) as server:
        handler: Any = server.RequestHandlerClass

        class Faulty(handler):  # type: ignore[misc]
            def do_GET(self) -> None:  # noqa: N802 - its base names it so
                with faults.lock:
                    faults.asked[self.path] += 1
                    if self.headers.get("Range"):
                        faults.ranges.append(self.headers["Range"])
                    refused = faults.refuse > 0
                    faults.refuse -= refused
                    path = directory / self.path[1:]
                    large = self.path.startswith("/objects") and path.stat().st_size > 1 << 20
                    cut = large and not refused and faults.cut > 0
                    faults.cut -= cut
                if refused:
                    self._begin(faults.status, 0)
                    return
                if cut:
                    data = path.read_bytes()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.send_header("ETag", f'"{path.name}"')
                    self.end_headers()
                    half = len(data) // 2
                    faults.sent -= len(data) - half
                    self.wfile.write(data[:half])
                    self.close_connection = True
                    return
                super().do_GET()

            def send_header(self, name: str, value: str) -> None:
                if name == "Content-Length" and self.path.startswith("/objects"):
                    faults.sent += int(value)
                super().send_header(name, value)

        server.RequestHandlerClass = Faulty
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.url, faults
        finally:
            server.shutdown()
            thread.join()


class _Files(BaseHTTPRequestHandler):
    """Files of any name, and ranges of them, as web servers send them."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        path = self.server.directory / self.path[1:]
        data = path.read_bytes() if path.is_file() else b""
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1] if first else data
        # As those of nginx, with a time in seconds.
        tag = f'"{int(path.stat().st_mtime) if data else 0:x}-{len(data):x}"'
        if data and self.headers.get("If-None-Match") == tag:
            self.send_response(304)
            self.end_headers()
            return
        self.send_response(404 if not data else 206 if first else 200)
        if first:
            stop = int(first) + len(part) - 1
            self.send_header("Content-Range", f"bytes {first}-{stop}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        if data:
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        self.end_headers()
        if cut := self.server.cut is not None and len(part) > 1 << 20:
            part = part[: len(part) // 2]
            self.close_connection = True
        self.server.sent.append(len(part))
        self.wfile.write(part)
        if cut:
            self.server.cut, then = None, self.server.cut
            then()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its base names it so
        """Write nothing."""


@contextmanager
def files_served(
    directory: Path, cut: Callable[[], object] | None = None
) -> Iterator[tuple[str, list[int]]]:
    """Serve the files of a directory; the URL, and the bytes of each answer.

    The first answer of more than a megabyte ends in its middle, where a call is given for then.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), _Files) as made:
        server: Any = made
        server.directory, server.sent, server.cut = directory, [], cut
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", server.sent
        finally:
            server.shutdown()
            thread.join()
