"""A machine that is gone says nothing: workers and trainers notice within a stated time."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sync_core import Sender, SendError
from sync_plugin_std.local import channel
from sync_testing import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

WORKER = """
import pickle, sys, time
from torch import nn
from sync_core import Receiver, SenderLostError
from sync_plugin_std.local import channel
channel._SILENCE = 4.0
receiver = Receiver(pickle.load(open(sys.argv[1], "rb")), nn.Linear(3, 2), timeout=60.0)
print("connected", flush=True)
try:
    while True:
        print("has", receiver.receive(60.0), flush=True)
except SenderLostError as error:
    print("lost", error, flush=True)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, str]]:
    """Another machine, as far as the network is concerned: its name, and our address for it."""
    if shutil.which("ip") is None or os.getuid() != 0:
        pytest.skip("needs root, and ip of iproute2")
    name, link = f"sync{os.getpid()}", f"sy{os.getpid()}"
    host = f"10.213.{os.getpid() % 250}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs network namespaces: {error.stderr!r}")
    try:
        try:
            ip("link", "add", link, "type", "veth", "peer", "name", "there", "netns", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs pairs of virtual interfaces: {error.stderr!r}")
        ip("addr", "add", f"{host}.1/24", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", name, "addr", "add", f"{host}.2/24", "dev", "there")
        ip("-n", name, "link", "set", "there", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, f"{host}.1"
        ip("link", "del", link)
    finally:
        ip("netns", "del", name)


@pytest.mark.parametrize("topology", ["p2p", "broadcast"])
def test_a_machine_that_is_gone(
    elsewhere: tuple[str, str], topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_SILENCE", 4.0)
    name, host = elsewhere
    model = nn.Linear(3, 2)
    options: dict[str, Any] = {"host": host, "topology": topology}
    with Sender("dist", model, num_workers=1, timeout=30.0, **options) as sender:
        address = tmp_path / "address"
        address.write_bytes(pickle.dumps(sender.address(0)))
        command = ["ip", "netns", "exec", name, sys.executable, "-c", WORKER, str(address)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            try:
                assert worker.stdout.readline() == "connected\n"
                assert sender.send().updated == (0,)
                assert worker.stdout.readline() == "has 1\n"
                ip("-n", name, "link", "set", "there", "down")
                # Idle on both sides, then in a send.
                started = time.monotonic()
                with pytest.raises(SendError):
                    sender.send()
                assert time.monotonic() - started < 15
                assert eventually(lambda: sender.workers[0].state == "lost", 15)
                started = time.monotonic()
                with pytest.raises(SendError, match="is gone"):
                    sender.send()
                assert time.monotonic() - started < 1
                assert worker.stdout.readline().startswith("lost the sender is gone")
            finally:
                worker.kill()


def test_an_idle_connection(
    elsewhere: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_SILENCE", 4.0)
    name, host = elsewhere
    with Sender("dist", nn.Linear(3, 2), num_workers=1, timeout=30.0, host=host) as sender:
        address = tmp_path / "address"
        address.write_bytes(pickle.dumps(sender.address(0)))
        command = ["ip", "netns", "exec", name, sys.executable, "-c", WORKER, str(address)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            try:
                assert worker.stdout.readline() == "connected\n"
                ip("-n", name, "link", "set", "there", "down")
                assert eventually(lambda: sender.workers[0].state == "lost", 15)
                assert worker.stdout.readline().startswith("lost the sender is gone")
            finally:
                worker.kill()
