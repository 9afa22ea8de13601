"""Objects behind a web server, read over HTTP: `WebObjects`.

This module does not use obstore, which follows redirects to any address.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from sync_core import OptionError
from sync_core.errors import PayloadError
from sync_plugin_store.errors import StoreError
from sync_plugin_store.objects import (
    LONGEST_RECORD,
    PIECE,
    Found,
    NoRangesError,
    Patience,
    Validator,
)
from sync_plugin_store.remote_objects import RemoteObjects

__all__ = ["WebObjects"]

#: The scheme, host and port of a server.
Origin: TypeAlias = tuple[str, str, int]

_PORTS = {"http": 80, "https": 443}
_GONE, _REFUSED, _REDIRECTED = (404, 410), (401, 403, 407), (301, 302, 303, 307, 308)
_ANSWERS = (200, 206, 304, 416, *_GONE)
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_MOST_REDIRECTS = 5
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:([0-9]{1,18})|\*)")
# Unneeded answers up to this size are read, so that the connection can be reused, in bytes.
_DRAINED = 1 << 16
# A file written within this time, in seconds, may be written again within the same second and get
# the same tag. The clocks of a server and its disks may differ by as much.
_COARSE_FOR = 60.0
# The time limit of a connection attempt, in seconds.
_CONNECT = 5.0


class _BrokenError(Exception):
    """A request failed, but a retry may succeed."""


class _TimedSocket:
    """A socket with one deadline for all calls together, even if bytes arrive slowly."""

    def __init__(self, sock: Any) -> None:
        self._socket = sock
        self.deadline = 0.0
        # Closes the socket of a reader that was not closed.
        weakref.finalize(self, sock.close).atexit = False

    def limit(self) -> None:
        """Limit the next call to the time until the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server has not answered in time")
        self._socket.settimeout(left)

    def sendall(self, data: Any) -> None:
        self.limit()
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        del mode
        return io.BufferedReader(_TimedReader(self, self._socket.makefile("rb", buffering=0)))

    def end(self) -> None:
        """Make calls on other threads end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _TimedReader(io.RawIOBase):
    def __init__(self, timed: _TimedSocket, raw: Any) -> None:
        self._timed, self._raw = timed, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        self._timed.limit()
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class WebObjects(RemoteObjects):
    """Objects of a directory that a web server serves.

    Args:
        url: the URL of the directory.
        timeout: the longest time for a request, and how long failed requests are retried, in
            seconds.
        redirects: URLs of other servers to which it may redirect.
    """

    def __init__(self, url: str, timeout: float, redirects: Sequence[str] = ()) -> None:
        super().__init__(url, timeout)
        self._timeout = timeout
        self._own = _origin_of(url)
        self._origins = {self._own, *map(_origin_of, redirects)}
        if self._own[::2] == ("http", 80):
            self._origins.add(("https", self._own[1], 443))
        self._context = ssl.create_default_context()
        # The idle connections.
        self._idle: list[tuple[Origin, Any]] = []
        # The sockets of requests in progress.
        self._busy = set[_TimedSocket]()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def look(self, name: str, tag: str | None = None) -> Found | None:
        patience = Patience(self._timeout, self._closed)
        # A tag "sha256:…" is made from the bytes, for servers without tags, such as Python's.
        known = {"If-None-Match": tag} if tag and not tag.startswith("sha256:") else {}
        while True:
            try:
                with self._get(name, known) as response:
                    if response.status in {304, *_GONE}:
                        return None
                    data = response.read(LONGEST_RECORD + 1)
                    self.check_record(name, len(data))
                    if response.length:
                        raise _BrokenError(f"it ended {response.length} bytes too early")
                    found = response.getheader("ETag")
                break
            except _BrokenError as error:
                if not patience.pause():
                    raise self._failed("read", name, error) from error
        digest = hashlib.sha256(data).hexdigest()
        # Tags may be times in seconds, so two states within a second may have the same tag.
        if not found or digest not in found:
            found = f"sha256:{digest}"
        return None if found == tag else Found(data, found)

    def read(
        self,
        name: str,
        start: int,
        memory: memoryview,
        patience: Patience,
        *,
        whole: bool,
        validator: Validator | None = None,
    ) -> bool:
        done, validator = 0, validator or Validator()
        while done < len(memory):
            before = done
            headers = {}
            if start + done or not whole:
                headers = {"Range": f"bytes={start + done}-{start + len(memory) - 1}"}
            try:
                with self._get(name, headers) as response:
                    if response.status in _GONE:
                        return False
                    if response.status == 200:
                        if not whole:
                            raise NoRangesError.of(self.url)
                        # Begin again, even if a range was requested.
                        done = before = 0
                    self._check_answer(response, name, start + done, start + len(memory))
                    self._check_state(response, name, validator)
                    while done < len(memory):
                        count = response.readinto(memory[done : done + PIECE])
                        if not count:
                            raise _BrokenError("it ended too early")
                        done += count
            except _BrokenError as error:
                # Resume where it broke, but leave a server that sent nothing: another may be
                # better.
                if done == before or not patience.pause():
                    raise self._failed("read", name, error) from error
        return True

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
            for timed in self._busy:
                timed.end()
        for _, connection in idle:
            connection.close()

    def _check_answer(self, response: HTTPResponse, name: str, start: int, stop: int) -> None:
        """Raise unless an answer has the requested bytes."""
        size = _size_of(response)
        if response.status == 200:
            if size is not None and size != stop:
                raise PayloadError(f"{name} in {self.url} has {size} bytes, not {stop} as agreed")
            return
        if response.status == 416 or (size is not None and size < stop):
            raise PayloadError(f"{name} in {self.url} ends before its byte {stop}")
        found = _RANGE.fullmatch(response.getheader("Content-Range") or "")
        if response.status != 206 or found is None or int(found[1]) != start:
            raise StoreError(f"{self.url} has sent another range of {name} than was asked for")

    def _check_state(self, response: HTTPResponse, name: str, validator: Validator) -> None:
        written = response.getheader("Last-Modified")
        tag = response.getheader("ETag") or written
        validator.check((tag, _size_of(response)), name, self.url)
        age = _seconds(response.getheader("Date")) - _seconds(written)
        validator.coarse = bool(written) and age < _COARSE_FOR

    @contextmanager
    def _get(self, name: str, headers: dict[str, str]) -> Iterator[HTTPResponse]:
        """Request an object, and follow redirects to allowed servers.

        Raises:
            _BrokenError: the request failed, but a retry may succeed.
            StoreError: the request failed for good.
        """
        deadline = time.monotonic() + max(self._timeout, _CONNECT)
        base = (
            self.url
            if "@" not in self.url
            else "{}://{}:{}".format(*self._own) + (urlsplit(self.url).path)
        )
        url = f"{base.rstrip('/')}/{quote(name)}"
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                origin, connection, response = self._ask(url, headers, deadline)
                location = response.getheader("Location")
                if response.status not in _REDIRECTED or location is None:
                    break
                self._end(connection, response)
                url = self._redirected(name, urljoin(url, location))
            else:
                raise StoreError(f"{name} in {self.url} is redirected again and again")
            try:
                self._check_status(response, name)
                yield response
                if not response.isclosed() and (response.length or 0) < _DRAINED:
                    response.read()
            except BaseException:
                self._end(connection, response)
                raise
        except StoreError:
            raise
        except ssl.SSLCertVerificationError as error:
            raise self._failed("read", name, error) from error
        except (OSError, HTTPException) as error:
            raise _BrokenError(f"{type(error).__name__}: {error}") from error
        if not response.isclosed() or connection.sock is None or self._closed.is_set():
            self._end(connection, response)
            return
        with self._lock:
            self._busy.discard(connection.timed)
            self._idle.append((origin, connection))

    def _check_status(self, response: HTTPResponse, name: str) -> None:
        said = f"the server answers {response.status} {response.reason:.100}"
        if response.status in _TEMPORARY:
            raise _BrokenError(said)
        if response.status in _REFUSED:
            said += "; let this process read there, or give another url"
        if response.status not in _ANSWERS:
            raise self._failed("read", name, OSError(said))
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise StoreError(f"{self.url} compresses {name}; let it send the bytes as they are")

    def _redirected(self, name: str, url: str) -> str:
        """Return the URL to which an object was redirected, if its server is allowed."""
        parts = urlsplit(url)
        try:
            allowed = parts.scheme in _PORTS and _origin_of(url) in self._origins
        except OptionError:
            allowed = False
        if not allowed:
            server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
            raise StoreError(
                f"{self.url} redirects {name} to {server[:200]!r}, which was not given, and no "
                "redirect to another server is followed; give the URL of that server, as a mirror, "
                "or type load_checkpoint(…, redirects=[URL])"
            )
        return url

    def _ask(
        self, url: str, headers: dict[str, str], deadline: float
    ) -> tuple[Origin, Any, HTTPResponse]:
        """Send a request over an open connection or a new one."""
        origin, parts = _origin_of(url), urlsplit(url)
        headers = {"Accept-Encoding": "identity", "User-Agent": "sync-plugin-store", **headers}
        user = urlsplit(self.url)
        if user.username is not None and origin == self._own:
            words = f"{unquote(user.username)}:{unquote(user.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(words.encode()).decode()}"
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        while True:
            reused = self._reuse(origin)
            connection = reused or _connect(origin, self._context, deadline)
            try:
                with self._lock:
                    self._busy.add(connection.timed)
                connection.timed.deadline = deadline
                prefix, extra = connection.through
                connection.request("GET", prefix + target, headers={**headers, **extra})
                return origin, connection, connection.getresponse()
            except BaseException as error:
                self._end(connection)
                # The server may have closed the reused connection.
                if reused is None or not isinstance(error, ConnectionError):
                    raise

    def _end(self, connection: Any, response: HTTPResponse | None = None) -> None:
        with self._lock:
            self._busy.discard(connection.timed)
        if response is not None:
            response.close()
        connection.close()

    def _reuse(self, origin: Origin) -> Any:
        with self._lock:
            for number, (other, connection) in enumerate(self._idle):
                if other == origin:
                    del self._idle[number]
                    return connection
        return None


def _connect(origin: Origin, context: ssl.SSLContext, deadline: float) -> Any:
    """Connect to a server, through the proxy in this process's environment, if any."""
    scheme, host, port = origin
    timeout = max(0.001, min(_CONNECT, deadline - time.monotonic()))
    proxy = None if proxy_bypass(host) else getproxies().get(scheme)
    through: tuple[str, dict[str, str]] = ("", {})
    connection: Any
    if proxy is None:
        at = host, port
    else:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        at = parts.hostname or "", parts.port or 80
        if parts.username is not None:
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            encoded = base64.b64encode(words.encode()).decode()
            through = "", {"Proxy-Authorization": f"Basic {encoded}"}
        if scheme == "http":
            name = f"[{host}]" if ":" in host else host
            through = f"http://{name}:{port}", through[1]
    if scheme == "https":
        connection = HTTPSConnection(*at, timeout=timeout, context=context)
        if proxy is not None:
            connection.set_tunnel(host, port, through[1])
            through = "", {}
    else:
        connection = HTTPConnection(*at, timeout=timeout)
    connection.connect()
    connection.sock = connection.timed = _TimedSocket(connection.sock)
    connection.through = through
    return connection


def _origin_of(url: str) -> Origin:
    """Return the server of a URL, or raise `OptionError`."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError) as error:
        raise OptionError(
            f"a URL of a web server must begin with http:// or https://, got {url!r}"
        ) from error


def _size_of(response: HTTPResponse) -> int | None:
    """Return the size of the whole object; None if the answer does not have it."""
    if response.status == 206:
        found = _RANGE.fullmatch(response.getheader("Content-Range") or "")
        return None if found is None or found[2] is None else int(found[2])
    length = response.getheader("Content-Length") or ""
    return int(length) if length.isdecimal() and len(length) < 19 else None


def _seconds(date: str | None) -> float:
    """Return a header's date in seconds since 1970, or the current time if there is none."""
    try:
        return parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError, OverflowError):
        return time.time()
