"""The status of a sender, and `sync-core watch`, which shows it."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from torch import nn

from sync_core import ClosedError, Receiver, Sender, SendError
from sync_tools import SenderView, StatusServer, WorkerView
from sync_tools.commands.watch import StatusError, fetch
from sync_tools.main import main

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def sender() -> Iterator[Sender]:
    with Sender("thread", nn.Linear(2, 2), num_workers=2) as sender:
        yield sender


@pytest.fixture
def address(sender: Sender) -> str:
    return StatusServer(sender).address


def send_to_the_first(sender: Sender) -> Receiver:
    """Send a version that worker 0 receives, and worker 1 does not."""
    receiver = Receiver(sender.address(0), nn.Linear(2, 2))
    pending = sender.send_async()
    receiver.receive()
    with pytest.raises(SendError):
        pending.wait(0)
    return receiver


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sync-status"]


def test_the_status_names_what_is_stale(sender: Sender, address: str) -> None:
    before = fetch(address)
    assert (before["version"], before["last"], before["sends"]) == (0, None, 0)
    receiver = send_to_the_first(sender)
    status = fetch(address)
    assert (status["scheme"], status["version"], status["failed_sends"]) == ("thread", 1, 1)
    assert status["last"]["publish_seconds"] > 0
    fresh, stale = status["workers"]
    assert (fresh["state"], fresh["version"], fresh["lag"], fresh["error"]) == (
        "current",
        1,
        0,
        None,
    )
    assert fresh["last"]["commit_seconds"] > 0
    assert fresh["last"]["nbytes"] == status["nbytes"] > 0
    assert (stale["state"], stale["version"], stale["lag"]) == ("suspect", 0, 1)
    assert "did not confirm version 1" in stale["error"]
    receiver.close()


def test_json_has_the_fields_that_are_documented(address: str) -> None:
    status = fetch(address)
    assert status.keys() == {*SenderView.__dataclass_fields__}
    assert status["workers"][0].keys() == {*WorkerView.__dataclass_fields__}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 403), ("GET", "/wrong", 403), ("POST", "/", 403), ("POST", None, 405)],
)
def test_only_reading_with_the_token_is_answered(
    address: str, method: str, path: str | None, status: int
) -> None:
    parts = urlsplit(address)
    assert parts.hostname == "127.0.0.1"
    connection = HTTPConnection("127.0.0.1", parts.port or 0, timeout=5)
    connection.request(method, path or parts.path)
    response = connection.getresponse()
    assert response.status == status
    assert json.loads(response.read()).keys() == {"error"}
    connection.close()


@pytest.mark.parametrize("request_", [b"", b"\r\n\r\n", b"\x00\xff\r\n\r\n", b"GET\r\n"])
def test_any_other_bytes_are_refused(address: str, request_: bytes) -> None:
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as connection:
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100).startswith(b"HTTP/1.0 403")


def test_a_request_without_end_is_not_read_to_its_end(address: str) -> None:
    parts = urlsplit(address)
    with (
        socket.create_connection((parts.hostname, parts.port), timeout=5) as connection,
        pytest.raises(ConnectionError),
    ):
        connection.sendall(b"GET /" + b"x" * 100_000_000)
    assert fetch(address)["version"] == 0


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:99999/x", "http://127.0.0.1:x/", "http://[::1"]
)
def test_an_address_that_is_none(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", address]) == 1
    assert "is not a status address; it looks like http://" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer", ["404 Not Found\r\n\r\n{}", "200 OK\r\n\r\n[1]", "200 OK\r\n\r\n{}"]
)
def test_another_server_at_the_address(answer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(f"HTTP/1.0 {answer}".encode())

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StatusError, match="is not a StatusServer; give the address"):
            fetch(f"http://127.0.0.1:{server.getsockname()[1]}/docs")
        thread.join()


@pytest.mark.parametrize("sent", [b"", b"GET", b"drip", b"deaf"])
def test_readers_that_are_slow_delay_no_other(address: str, sent: bytes) -> None:
    parts = urlsplit(address)
    before = descriptors()
    ended = threading.Event()
    with ExitStack() as stack:
        held = [socket.create_connection((parts.hostname, parts.port)) for _ in range(100)]
        for connection in held:
            stack.enter_context(connection)
            # Those that were too many are closed.
            with suppress(OSError):
                connection.sendall(
                    f"GET {parts.path} X\r\n\r\n".encode() if sent == b"deaf" else sent
                )

        def drip() -> None:
            while not ended.wait(0.01):
                for connection in held:
                    with suppress(OSError):
                        connection.send(b"x")

        thread = threading.Thread(target=drip)
        if sent == b"drip":
            thread.start()
            stack.callback(thread.join)
            stack.callback(ended.set)
        began = time.monotonic()
        for _ in range(3):
            assert fetch(address)["version"] == 0
        assert time.monotonic() - began < 0.9
        # The server's half of each connection: at most 64, and none after a second or two.
        assert descriptors() <= before + len(held) + 66
        deadline = time.monotonic() + 10
        while descriptors() > before + len(held) + 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_body_of_a_request_is_no_request(address: str) -> None:
    parts = urlsplit(address)
    inner = f"GET {parts.path} HTTP/1.1\r\n\r\n".encode()
    head = f"GET {parts.path} HTTP/1.1\r\nContent-Length: {len(inner)}\r\n\r\n".encode()
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as connection:
        connection.sendall(head + inner)
        with connection.makefile("rb") as file:
            assert file.read().count(b"HTTP/1.0 ") == 1


def test_closing_ends_the_thread_and_the_port(sender: Sender, address: str) -> None:
    assert threads()
    sender.close()
    assert not threads()
    with pytest.raises(StatusError, match="no sender answers"):
        fetch(address)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_port_open(sender: Sender, address: str) -> None:
    held, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(held, 1)
        os._exit(0)
    try:
        sender.close()
        with pytest.raises(StatusError, match="no sender answers"):
            fetch(address)
    finally:
        os.close(release)
        os.close(held)
        os.waitpid(child, 0)


def test_a_forgotten_sender_is_not_kept_alive() -> None:
    forgotten = Sender("thread", nn.Linear(2, 2), num_workers=1)
    server = StatusServer(forgotten)
    reference = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert reference() is None
    assert not threads()
    with pytest.raises(ReferenceError):
        server.view()


def test_a_server_is_closed_before_its_sender(sender: Sender) -> None:
    with StatusServer(sender) as server, StatusServer(sender) as other:
        server.close()
        server.close()
        with pytest.raises(StatusError, match="no sender answers"):
            fetch(server.address)
        send_to_the_first(sender)
        assert fetch(other.address)["sends"] == 1
        assert server.view().sends == 0
    assert not threads()


def test_a_closed_sender_has_no_server(sender: Sender) -> None:
    sender.close()
    with pytest.raises(ClosedError):
        StatusServer(sender)
    with pytest.raises(TypeError, match=r"got None; type StatusServer\(collector\.sender\)"):
        StatusServer(None)  # type: ignore[arg-type]
    assert not threads()


def test_watch_prints_a_table(sender: Sender, address: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    receiver = send_to_the_first(sender)
    assert main(["watch", address, "--once"]) == 0
    printed = capsys.readouterr().out
    assert "policy by thread" in printed
    assert "1 sends, 1 failed" in printed
    fresh, stale = (re.search(rf"^ +{i} .*$", printed, re.MULTILINE) for i in range(2))
    assert fresh is not None
    assert fresh[0].split()[:2] == ["0", "current"]
    assert fresh[0].split()[-1] == "0.0"
    assert stale is not None
    assert stale[0].split() == ["1", "suspect", "0", "s", "0", "1"]
    assert "worker 1: did not confirm version 1" in printed
    receiver.close()


def test_watch_goes_on_until_the_sender_closes(sender: Sender, address: str, capsys: Any) -> None:
    started = time.monotonic()
    closing = threading.Timer(0.2, sender.close)
    closing.start()
    assert main(["watch", address, "--interval", "0.05"]) == 0
    closing.join()
    assert time.monotonic() - started >= 0.2
    assert "its process has ended" in " ".join(capsys.readouterr().out.split())


def test_watch_prints_json(address: str, capsys: Any) -> None:
    assert main(["watch", address, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["workers"][1]["state"] == "connecting"


@pytest.mark.parametrize("address", ["", "policy", "http://127.0.0.1", "https://127.0.0.1:1/x"])
def test_watch_names_what_an_address_looks_like(address: str, capsys: Any) -> None:
    assert main(["watch", address]) == 1
    assert "print(StatusServer(sender).address)" in capsys.readouterr().err


def test_a_report_is_json(sender: Sender, address: str) -> None:
    send_to_the_first(sender)
    result = fetch(address)["workers"][1]["last"]
    assert result["version"] is None
    assert asdict(sender.workers[1])["failures"] == 1
