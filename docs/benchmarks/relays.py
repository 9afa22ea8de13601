"""Measures the time until the last of eight hosts has a version, over links of limited bandwidth.

    python docs/benchmarks/relays.py | python docs/benchmarks/page.py --record relays

Takes about 150 seconds and 14 GB of memory. Each host is a process in a network namespace, and `tc`
limits its link: see `_limited_links.py`, which needs root. ``direct``: the sender has eight
workers. ``chain``: the hosts form a chain, each with a relay and a worker. ``tree``: each relay
forwards to two others. The time of one link is measured with one worker. Every worker compares
every element.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from _limited_links import Role, hosts, missing
from torch import Tensor

from sync_core import Address, Receiver, Sender
from sync_plugin_scale import Chunked, Relay

HOSTS = 8
CHUNKS = 64
TENSORS = 8
_TIMEOUT = 600.0


def values(numel: int, version: int) -> Tensor:
    """Return elements that depend on their position and the version."""
    return torch.arange(version, version + numel, dtype=torch.int32)


def trainer(address: str, pipe: Connection, *, nbytes: int) -> None:
    """Run the sender, which executes the program's requests."""
    numel = nbytes // 4 // TENSORS
    policy = {str(i): values(numel, 0) for i in range(TENSORS)}
    sender: Sender | None = None
    version = 0
    while True:
        request = pipe.recv()
        if isinstance(request, tuple):
            count, in_chunks = request
            if sender is not None:
                sender.close()
            sender = Sender(
                Chunked("dist", mb=nbytes / CHUNKS / 1e6) if in_chunks else "dist",
                policy,
                num_workers=count,
                host=address,
                shared_memory=False,
                timeout=_TIMEOUT,
                version=version,
            )
            pipe.send([sender.address(i) for i in range(count)])
        else:
            assert sender is not None
            version += 1
            for tensor in policy.values():
                tensor.copy_(values(numel, version))
            started = time.perf_counter()
            sender.send()
            pipe.send(time.perf_counter() - started)


class Host:
    """A worker, and a relay if the host forwards versions.

    Args:
        address: the address of the host.
        nbytes: the bytes of the model.
    """

    def __init__(self, address: str, nbytes: int) -> None:
        self._address = address
        self._numel = nbytes // 4 // TENSORS
        self._model = {str(i): torch.zeros(self._numel, dtype=torch.int32) for i in range(TENSORS)}
        self._relay: Relay | None = None
        self._receiver: Receiver | None = None

    def join(self, address: Address, others: int) -> list[Address]:
        """Receive from an address; return the addresses for hosts that receive from this one."""
        found: list[Address] = []
        if others:
            self._relay = Relay(address, num_workers=others + 1, host=self._address)
            *found, address = (self._relay.address(i) for i in range(others + 1))
        # Another host connects to it, so the connection uses the link.
        self._receiver = Receiver(address, self._model)
        return found

    def receive(self) -> int | None:
        """Receive a version, and compare every element; return the version, or None."""
        assert self._receiver is not None
        version = self._receiver.receive()
        if version is None:
            return None
        expected = values(self._numel, version)
        return version if all(torch.equal(t, expected) for t in self._model.values()) else None

    def leave(self) -> None:
        """Close the receiver, and the relay."""
        for each in (self._receiver, self._relay):
            if each is not None:
                each.close()
        self._relay = None


def worker(address: str, pipe: Connection, *, nbytes: int) -> None:
    """Run a host, which executes the program's requests."""
    host = Host(address, nbytes)
    while True:
        name, *arguments = pipe.recv()
        pipe.send(getattr(host, name)(*arguments))


def ask(pipe: Connection, *request: Any) -> Any:
    """Return the answer of a host."""
    pipe.send(request)
    return pipe.recv()


def connect(way: str, pipes: list[Connection]) -> list[Connection]:
    """Connect sender, relays and workers; return the receiving hosts."""
    first, *others = pipes
    branches = {"one link": 1, "direct": HOSTS, "chain": 1, "tree": 2}[way]
    open_ones: list[Address] = ask(first, branches, way in ("chain", "tree"))
    if way == "one link":
        others = others[:1]
    for index, pipe in enumerate(others):
        left = len(others) - index - 1 - len(open_ones) + 1
        passes_on = min(branches, left) if way in ("chain", "tree") else 0
        open_ones += ask(pipe, "join", open_ones.pop(0), max(0, passes_on))
    return others


def measure(way: str, pipes: list[Connection], sends: int) -> float:
    """Return the seconds until the last worker has the version, in the last of several sends."""
    receiving = connect(way, pipes)
    seconds = 0.0
    for _ in range(sends):
        for pipe in receiving:
            pipe.send(("receive",))
        pipes[0].send("send")
        seconds = pipes[0].recv()
        versions = {pipe.recv() for pipe in receiving}
        if len(versions) != 1 or None in versions:
            raise RuntimeError(f"{way}: a worker has not what was sent: {versions}")
    # Hosts that receive from others leave first.
    for pipe in reversed(receiving):
        ask(pipe, "leave")
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=400.0, help="of the model")
    parser.add_argument("--mbit", type=float, default=400.0, help="of each link, per second")
    parser.add_argument("--ways", nargs="+", default=["direct", "chain", "tree"])
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    nbytes = int(arguments.mb * 1e6)
    roles: list[Role] = [
        partial(trainer, nbytes=nbytes),
        *(partial(worker, nbytes=nbytes) for _ in range(HOSTS)),
    ]
    print("| way | MB | Mb/s of a link | seconds | over those of one link |")
    print("|---|--:|--:|--:|--:|")
    size = f"{arguments.mb:g} | {arguments.mbit:g}"
    with hosts(roles, arguments.mbit) as pipes:
        link = measure("one link", pipes, sends=2)
        print(f"| one link | {size} | {link:.1f} | 1.00 |", flush=True)
        for way in arguments.ways:
            # The first send also connects, which takes little time compared to eight transfers.
            seconds = measure(way, pipes, sends=1 if way == "direct" else 2)
            print(f"| {way} | {size} | {seconds:.1f} | {seconds / link:.2f} |", flush=True)


if __name__ == "__main__":
    main()
