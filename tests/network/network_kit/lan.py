"""Hosts in network namespaces, on a switch that loses, delays, doubles and reorders frames.

Each host has one interface, the other end of which is a file that this process reads and writes:
so faults need nothing of the kernel but namespaces and TUN/TAP. Faults are of one direction of one
pair of hosts; a partition is both directions, a half-open link is one. Needs root, and `ip`
(Debian: iproute2).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# Of setns(2), and of linux/if_tun.h: an interface for frames, without a header of its own.
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME = 2048
# How long a frame that is overtaken waits for the one that overtakes it, in seconds.
_OVERTAKEN = 0.005
_NODE = Path(__file__).with_name("node.py")


@dataclass(frozen=True, slots=True)
class Disorder:
    """The fate of frames that are not lost to a partition.

    Args:
        lost: the share that is lost.
        doubled: the share that comes twice.
        overtaken: the share that comes after the frame behind it.
    """

    lost: float = 0.0
    doubled: float = 0.0
    overtaken: float = 0.0


def missing() -> str | None:
    """Return why there can be no hosts here; None where there can be."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip not found; on Debian: apt install iproute2"
    if not Path("/dev/net/tun").exists():
        return "this kernel has no TUN/TAP"
    return None


class Lan:
    """Some hosts on one switch; made by `lan`.

    Args:
        names: the namespaces of the hosts.
        files: the other end of the interface of each.
    """

    def __init__(self, names: Sequence[str], files: Sequence[int]) -> None:
        self._names = names
        self._files = files
        self._cut: frozenset[tuple[int, int]] = frozenset()
        self.disorder = Disorder()
        self._random = random.Random(0)
        self._held: list[tuple[int, bytes]] = []
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._switch, name="lan")
        self._thread.start()

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.78.0.{host + 1}"

    def cut(self, *directions: tuple[int, int]) -> None:
        """Lose all frames from the first to the second host of each direction, and no others."""
        self._cut = frozenset(directions)

    def start(self, host: int, *arguments: str) -> subprocess.Popen[str]:
        """Run ``node.py`` on a host, with its standard input and output as pipes."""
        command = ["ip", "netns", "exec", self._names[host], sys.executable, str(_NODE)]
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *arguments], stdin=pipe, stdout=pipe, text=True)

    def close(self) -> None:
        """End the switch."""
        os.close(self._stop)
        self._thread.join()
        os.close(self._wake)

    def _switch(self) -> None:
        hosts = {file: host for host, file in enumerate(self._files)}
        while True:
            wait = _OVERTAKEN if self._held else None
            readable, _, _ = select.select([*hosts, self._wake], [], [], wait)
            if self._wake in readable:
                return
            for file in readable:
                self._pass_on(hosts[file], os.read(file, _FRAME))
            if not readable:
                self._release()

    def _pass_on(self, source: int, frame: bytes) -> None:
        """Bring a frame to the host that the last byte of its address names, or to all."""
        everyone = frame[0] & 1
        targets = range(len(self._files)) if everyone else [frame[5]]
        for target in targets:
            if target == source or target >= len(self._files) or (source, target) in self._cut:
                continue
            chance = self._random.random
            if chance() < self.disorder.lost:
                continue
            if chance() < self.disorder.overtaken:
                self._held.append((target, frame))
                continue
            for _ in range(2 if chance() < self.disorder.doubled else 1):
                self._write(target, frame)
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, []
        for target, frame in held:
            self._write(target, frame)

    def _write(self, target: int, frame: bytes) -> None:
        # The queue of an interface that is full loses it, as that of a real one does.
        with suppress(OSError):
            os.write(self._files[target], frame)


@contextmanager
def lan(count: int) -> Iterator[Lan]:
    """Make some hosts, with addresses from 10.78.0.1 on; they end with the block."""
    with ExitStack() as stack:
        names, files = [], []
        for host in range(count):
            name = f"sync{os.getpid()}x{host}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            file = _interface_in(name)
            stack.callback(os.close, file)
            # The last byte tells the switch which host it is.
            _ip("-n", name, "link", "set", "eth0", "address", f"02:00:00:00:00:{host:02x}")
            _ip("-n", name, "addr", "add", f"10.78.0.{host + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            names.append(name)
            files.append(file)
        made = Lan(names, files)
        stack.callback(made.close)
        yield made


def _interface_in(name: str) -> int:
    """Make eth0 in a namespace, and return the file by which its frames are read and written."""
    made: list[int] = []

    def make() -> None:
        # A namespace is one of a thread's, which ends with this.
        with Path("/run/netns", name).open(encoding="utf-8") as namespace:
            if ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                return
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TAP | _IFF_NO_PI))
        made.append(file)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise OSError(f"no interface could be made in the namespace {name}")
    return made[0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
