"""Runs processes in network namespaces, each behind a link of limited bandwidth.

Each process is a host with an address. A bridge in another namespace connects all hosts. `tc`
limits how fast a host sends and receives. Namespaces and links end with the processes. Needs root,
`ip` and `tc` (Debian: iproute2).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

# A constant of unshare(2); `os.unshare` came with Python 3.12.
_CLONE_NEWNET = 0x40000000
# Allows the bursts of a sender, so that TCP reaches the rate.
_BUFFER = ("burst", "256kb", "latency", "200ms")
_PRELOADED = ["torch", "sync_core", "sync_core.receiving.receiver", "sync_plugin_dist"]
_CONTEXT = get_context("forkserver")

#: A function that runs on a host, with the host's address and a pipe to the program.
Role = Callable[[str, Connection], None]


def missing() -> str | None:
    """Return why limited links are not possible here; None if they are."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return (
        f"{' and '.join(lacking)} not found; on Debian: apt install iproute2" if lacking else None
    )


def address_of(index: int) -> str:
    """Return the address of a host."""
    return f"10.77.0.{index + 1}"


@contextmanager
def hosts(roles: Sequence[Role], mbit: float) -> Iterator[list[Connection]]:
    """Run each role on a separate host.

    Args:
        roles: functions of a module, with their arguments.
        mbit: the bandwidth of each host in each direction, in Mbit/s.

    Yields:
        The pipes to the hosts. The hosts are killed at the end.
    """
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    processes: list[Any] = []
    try:
        pipes = []
        for index, role in enumerate(roles):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_be_host, args=(index, role, there, mbit))
            process.start()
            processes.append(process)
            pipes.append(here)
        pids = [pipe.recv() for pipe in pipes]
        here, there = _CONTEXT.Pipe()
        bridge = _CONTEXT.Process(target=_be_bridge, args=(pids, there, mbit))
        bridge.start()
        processes.append(bridge)
        here.recv()
        for pipe in pipes:
            pipe.send("connected")
        yield pipes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _be_host(index: int, role: Role, pipe: Connection, mbit: float) -> None:
    _enter_namespace()
    pipe.send(os.getpid())
    pipe.recv()
    _ip("addr", "add", f"{address_of(index)}/24", "dev", "eth0")
    _ip("link", "set", "eth0", "up")
    _limit("eth0", mbit)
    role(address_of(index), pipe)


def _be_bridge(pids: Sequence[int], pipe: Connection, mbit: float) -> None:
    _enter_namespace()
    _ip("link", "add", "bridge", "type", "bridge")
    _ip("link", "set", "bridge", "up")
    for index, pid in enumerate(pids):
        port = f"port{index}"
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _ip("link", "set", port, "master", "bridge", "up")
        _limit(port, mbit)
    pipe.send("connected")
    pipe.recv()  # until it is killed


def _enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"no network namespace can be made here: {os.strerror(error)}")
    _ip("link", "set", "lo", "up")


def _limit(device: str, mbit: float) -> None:
    rate = f"{mbit:g}mbit"
    _run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *_BUFFER)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
