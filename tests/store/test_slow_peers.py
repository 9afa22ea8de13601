"""Peers that keep their connections to `sync-core serve` open delay no other peer."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from sync_plugin_store import web

pytestmark = pytest.mark.timeout(30)

LARGE = bytes(64 << 20)
NAME = f"/objects/{hashlib.sha256(LARGE).hexdigest()}"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The address of a server with room for four, which waits for half a second."""
    monkeypatch.setattr(web, "_MOST", 4)
    monkeypatch.setattr(web, "_SILENCE", 0.5)
    (tmp_path / "HEAD").write_bytes(b"head")
    (tmp_path / "objects").mkdir()
    (tmp_path / NAME[1:]).write_bytes(LARGE)
    with web.serve(str(tmp_path)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)


def head_of(address: tuple[str, int]) -> bytes:
    connection = HTTPConnection(*address, timeout=10)
    connection.request("GET", "/HEAD")
    try:
        return connection.getresponse().read()
    finally:
        connection.close()


def begun(address: tuple[str, int]) -> socket.socket:
    """A connection whose request has no end."""
    connection = socket.create_connection(address, timeout=10)
    connection.sendall(b"GET /HEAD HTTP/1.1\r\nX: ")
    return connection


def test_a_reader_is_served_beside_peers_that_say_nothing(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_SILENCE", 60.0)
    with ExitStack() as stack:
        peers = [stack.enter_context(begun(address)) for _ in range(12)]
        assert head_of(address) == b"head"
        # Of those that were first, to make room.
        assert peers[0].recv(1) == b""


def test_a_request_that_drips_in_ends_by_its_deadline(address: tuple[str, int]) -> None:
    with begun(address) as peer:
        start = time.monotonic()
        peer.settimeout(0.05)
        while time.monotonic() - start < 10:
            try:
                peer.sendall(b"x")
                if peer.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert 0.4 < time.monotonic() - start < 5


def test_an_object_that_is_taken_too_slowly_ends(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_SLOWEST", 1 << 30)
    with socket.create_connection(address, timeout=10) as peer:
        peer.sendall(f"GET {NAME} HTTP/1.1\r\n\r\n".encode())
        taken = 0
        while part := peer.recv(1 << 12):
            taken += len(part)
            if taken < 1 << 16:
                time.sleep(0.1)
        assert taken < len(LARGE)


def test_where_all_are_at_work_one_more_is_refused(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_SILENCE", 60.0)
    monkeypatch.setattr(web, "_STALLED", 60.0)
    with ExitStack() as stack:
        hold_all(address, stack)
        with socket.create_connection(address, timeout=10) as another:
            assert another.recv(1) == b""


def hold_all(address: tuple[str, int], stack: ExitStack) -> None:
    """Take all places with connections that ask for an object and read nothing of it."""
    for _ in range(4):
        peer = stack.enter_context(socket.create_connection(address, timeout=10))
        peer.sendall(f"GET {NAME} HTTP/1.1\r\n\r\n".encode())
        assert peer.recv(4) == b"HTTP"


def test_a_reader_is_served_beside_peers_that_take_nothing(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_SILENCE", 60.0)
    monkeypatch.setattr(web, "_STALLED", 0.0)
    with ExitStack() as stack:
        hold_all(address, stack)
        assert head_of(address) == b"head"


INNER = b"GET /HEAD HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        f"Content-Length: {len(INNER)}",
        f"Content-Length: 0\r\nContent-Length: {len(INNER)}",
        "Transfer-Encoding: chunked",
        f"Content-Length : {len(INNER)}",
        f'If-None-Match: "x"\r\nContent-Length: {len(INNER)}',
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_the_body_of_a_request_is_not_the_next_request(
    address: tuple[str, int], method: str, lines: str
) -> None:
    with socket.create_connection(address, timeout=10) as peer:
        peer.sendall(f"{method} /HEAD HTTP/1.1\r\n{lines}\r\n\r\n".encode() + INNER)
        answers = b""
        with suppress(ConnectionError):
            while part := peer.recv(1 << 12):
                answers += part
    assert answers.count(b"HTTP/1.1 ") <= 1
    assert b"\r\n\r\nhead" not in answers
