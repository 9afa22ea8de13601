"""Runs behind nginx and in MinIO, where these programs are."""

from __future__ import annotations

import http.client
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.store.linears import fill, model, tamper, values

from sync_core import Receiver, Sender
from sync_core.errors import PayloadError
from sync_plugin_scale import Part
from sync_plugin_store import Mirror, Run
from sync_plugin_store.format import object_name
from sync_plugin_store.objects import open_objects

_NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  server {{ listen 127.0.0.1:{port}; root {run}; }}
}}
"""


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[None]:
    """Run a server until the block ends; it listens when that begins."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 20.0
            while True:
                assert server.poll() is None, f"{command[0]} has ended"
                assert time.monotonic() < deadline, f"{command[0]} does not listen"
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
                    break
                except OSError:
                    time.sleep(0.02)  # it says nowhere when it listens
            yield
        finally:
            server.kill()


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on this machine's PATH")
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The directory that nginx serves, and its URL."""
    folder, run, port = tmp_path / "nginx", tmp_path / "run", free_port()
    folder.mkdir()
    run.mkdir()
    # As root, it would read files as another user, without access to this directory.
    user = "" if folder.owner() != "root" else "user root;"
    (folder / "conf").write_text(user + _NGINX.format(folder=folder, run=run, port=port))
    command = [program("nginx"), "-p", str(folder), "-c", str(folder / "conf")]
    command += ["-e", str(folder / "errors")]
    with running(command, port):
        yield str(run), f"http://127.0.0.1:{port}"


@pytest.fixture
def minio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A place in a bucket of MinIO, twice: it is written and read there."""
    port = free_port()
    command = [program("minio"), "server", str(tmp_path), "--address", f"127.0.0.1:{port}"]
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "minioadmin",
        "AWS_SECRET_ACCESS_KEY": "minioadmin",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    # A directory of MinIO is a bucket.
    (tmp_path / "weights").mkdir()
    with running(command, port):
        url = f"s3://weights/{secrets.token_hex(4)}"
        yield url, url


@pytest.fixture(params=["nginx", "minio"])
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The URL that the trainer writes to, and the one that readers read from."""
    found: tuple[str, str] = request.getfixturevalue(request.param)
    return found


def test_versions_shards_and_increments_are_read(place: tuple[str, str], tmp_path: Path) -> None:
    written, read = place
    trained, copy = {"weight": torch.randn(1024, 512)}, {"weight": torch.zeros(1024, 512)}
    part = Part({"weight": torch.zeros(256, 512)}, {"weight": ((256, 512), (0, 512))})
    with (
        Sender(
            "store", trained, url=written, chunks=True, anchor_every=3, poll=0.01, keep=2
        ) as sender,
    ):
        sender.send()
        key = Run.key_of(sender)
        with (
            Run(read, key) as run,
            Mirror(read, str(tmp_path / "mirror"), key, poll=600.0) as mirror,
            Receiver(run.address(poll=0.01), copy) as receiver,
            Receiver(run.address(poll=0.01), part) as other,
        ):
            # Several in a second, whose heads have the same size.
            for version in range(1, 8):
                assert receiver.receive(10.0) == version
                assert torch.equal(copy["weight"], trained["weight"])
                if version in (1, 4, 7):
                    assert other.receive(10.0) == version
                    assert torch.equal(part.model["weight"], trained["weight"][256:512])
                assert mirror.update() == version
                trained["weight"][version] += 1
                sender.send()


def test_nothing_that_was_tampered_with_is_committed(nginx: tuple[str, str]) -> None:
    written, read = nginx
    policy, copy = model(1.0), model(9.0)
    with Sender("store", policy, url=written) as sender:
        sender.send()
        with Run(read, Run.key_of(sender), timeout=0.3) as run:
            digest = max(run.manifest(1).pieces, key=lambda piece: piece.nbytes).digest
            tamper(Path(written) / object_name(digest), "changed")
            with Receiver(run.address(poll=0.01), copy, timeout=0.3) as receiver:
                with pytest.raises(PayloadError, match="version 1 cannot be read"):
                    receiver.receive(5.0)
                assert values(copy) == {9.0}
                fill(policy, 2.0)
                sender.send()
                assert receiver.receive(5.0) == 2
    assert values(copy) == {2.0}


def test_nginx_sends_ranges(nginx: tuple[str, str]) -> None:
    written, read = nginx
    open_objects(written, 5.0).put("objects/1", b"0123456789")
    connection = http.client.HTTPConnection(read.removeprefix("http://"), timeout=10.0)
    connection.request("GET", "/objects/1", headers={"Range": "bytes=2-4"})
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (206, b"234")
    connection.close()
