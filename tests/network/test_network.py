"""Partitions, half-open links, machines that are gone and disorder, between network namespaces.

    make test-network                      # 200 partitions of 0.05 to 60 s; a quarter of an hour
    make test-network PARTITIONS=10        # of each kind of fleet

A trainer sends a version after the other all the time, to workers on other hosts. Whatever the
network does: every version that a worker commits is whole and newer than the one before, what a
report calls updated was committed, every send ends by its deadline, and all workers are current
again some time after the network is.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from network_kit.lan import Disorder, Lan, lan, missing
from network_kit.node import TIMEOUT

PARTITIONS = int(os.environ.get("SYNC_PARTITIONS", "50"))
_SHORTEST, _LONGEST = 0.05, 60.0
# A send may end so much after its deadline, on a machine with few processors, in seconds.
_LATE = 2.0
# Machines that are gone are noticed within 20 s (docs/how-to/failures.md), after a send at most.
_NOTICED = 20.0 + TIMEOUT + 3.0
# TCP tries again after a partition as late as that has lasted; then a worker connects again, or is
# lost first.
_RECOVERED = 60.0
_STARTED = 60.0

pytestmark = pytest.mark.timeout(3600)

if why := missing():
    pytest.skip(why, allow_module_level=True)


@dataclass
class Node:
    """A program on a host, and what it has said."""

    process: subprocess.Popen[str]
    reader: threading.Thread | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self, told: Callable[[dict[str, Any]], None]) -> None:
        """Collect events until the program ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            told(event)
            with self.changed:
                self.events.append(event)
                self.changed.notify_all()

    def wait(
        self,
        wanted: Callable[[dict[str, Any]], bool],
        seconds: float,
        *,
        since: int = 0,
        others: Sequence[Node] = (),
    ) -> Any:
        """Return the first event that is wanted, of those that come from ``since`` on.

        Fails with what this node and others have said last when none comes in time.
        """
        seen = since
        with self.changed:

            def found() -> dict[str, Any] | None:
                nonlocal seen
                news, seen = self.events[seen:], len(self.events)
                return next((event for event in news if wanted(event)), None)

            event = self.changed.wait_for(found, seconds)
        last = [node.events[-4:] for node in (self, *others)]
        assert event, f"not within {seconds:g} s; last: {json.dumps(last, indent=1)}"
        return event

    def kill(self) -> None:
        """Let it end as a machine without power does: with no word."""
        self.process.kill()
        if self.reader is not None:
            self.reader.join()
        with self.process:
            pass


class Fleet:
    """A trainer on host 0, and workers on the others; of a relay, on the two hosts behind it.

    Args:
        network: the hosts.
        scheme: the trainer's scheme.
        options: its options.
        folder: for the addresses.
        stack: ends all programs.
        relayed: whether host 1 is a relay, and the workers are behind that.
    """

    def __init__(
        self,
        network: Lan,
        scheme: str,
        options: dict[str, Any],
        folder: Path,
        stack: ExitStack,
        *,
        relayed: bool,
    ) -> None:
        self.network = network
        self._folder = folder
        self._stack = stack
        self._scheme, self._relayed = scheme, relayed
        self._options = {"host": network.address(0), **options}
        self.hosts = [2, 3] if relayed else [1, 2]
        self.trainer = self.start_trainer()
        if relayed:
            arguments = ["relay", str(folder / "0"), network.address(1), "2"]
            passing = self._start(1, arguments, addresses="behind")
            passing.wait(lambda event: event["event"] == "addresses", _STARTED)
        self.workers = [self.start_worker(index) for index in range(2)]

    def start_trainer(self) -> Node:
        """Start a trainer, the first one or another."""
        count = "1" if self._relayed else "2"
        arguments = ["trainer", self._scheme, count, json.dumps(self._options)]
        node = self._start(0, arguments, addresses="")
        node.wait(lambda event: event["event"] == "addresses", _STARTED)
        return node

    def start_worker(self, index: int) -> Node:
        """Start a worker, the first one of its index or another."""
        address = self._folder / f"{'behind' if self._relayed else ''}{index}"
        return self._start(self.hosts[index], ["worker", str(address)])

    def _start(self, host: int, arguments: list[str], addresses: str | None = None) -> Node:
        def told(event: dict[str, Any]) -> None:
            if addresses is not None and event["event"] == "addresses":
                for index, text in enumerate(event["addresses"]):
                    path = self._folder / f"{addresses}{index}"
                    path.with_suffix(".new").write_bytes(bytes.fromhex(text))
                    path.with_suffix(".new").replace(path)

        node = Node(self.network.start(host, *arguments))
        node.reader = threading.Thread(target=node.read, args=(told,))
        node.reader.start()
        self._stack.callback(node.kill)
        return node

    def current(self, seconds: float) -> float:
        """Wait until a send that begins from now on has updated all; return the seconds taken."""
        began = time.monotonic()

        def everywhere(event: dict[str, Any]) -> bool:
            return (
                event["event"] == "send"
                and event["time"] - event["seconds"] >= began
                and len(event["updated"]) == (1 if self._relayed else 2)
            )

        sent = self.trainer.wait(everywhere, seconds, others=self.workers)
        took: float = sent["time"] - began
        return took

    def has_what_was_answered(self, worker_id: int) -> Callable[[dict[str, Any]], bool]:
        """Return whether an event is the commit of the newest version that a worker has answered.

        A worker answers before it says so.
        """
        sends = [event for event in self.trainer.events if worker_id in event.get("updated", ())]
        newest = sends[-1]["version"]
        return lambda event: event["event"] == "commit" and event["version"] >= newest

    def check(self) -> None:
        """End the trainer, and check all that has been said: see the docstring of this module."""
        self.trainer.kill()
        committed: list[set[int]] = []
        for index, worker in enumerate(self.workers):
            worker_id = 0 if self._relayed else index
            worker.wait(self.has_what_was_answered(worker_id), 10.0)
            commits = [event for event in worker.events if event["event"] == "commit"]
            versions = [event["version"] for event in commits]
            assert versions == sorted(set(versions))
            assert all(event["values"] == [event["version"]] for event in commits)
            committed.append(set(versions))
        for event in self.trainer.events:
            if event["event"] != "send":
                continue
            assert event["seconds"] < TIMEOUT + _LATE, event
            for worker_id in event["updated"]:
                # A relay has a version when those behind it have.
                for index in range(2) if self._relayed else [worker_id]:
                    assert event["version"] in committed[index], event


#: The scheme of each kind of fleet, its options, and whether a relay stands between.
FLEETS = {
    "p2p": ("dist", {}, False),
    "broadcast": ("dist", {"topology": "broadcast"}, False),
    "increments": ("increments::dist", {}, False),
    "relay": ("chunked::dist", {}, True),
}


@pytest.fixture(params=FLEETS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    scheme, options, relayed = FLEETS[request.param]
    with lan(4 if relayed else 3) as network, ExitStack() as stack:
        made = Fleet(network, scheme, dict(options), tmp_path, stack, relayed=relayed)
        made.current(_STARTED)
        yield made


def directions(chance: random.Random, hosts: int) -> list[tuple[int, int]]:
    """Return what is cut: one of the other hosts from the trainer, or all, or one way only."""
    others = [chance.randrange(1, hosts)] if chance.random() < 0.7 else list(range(1, hosts))
    ways = chance.choice(["both", "both", "to", "from"])
    there = [(0, other) for other in others]
    back = [(other, 0) for other in others]
    return {"both": there + back, "to": there, "from": back}[ways]


def test_partitions(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    chance = random.Random(request.node.name)
    took = []
    for number in range(PARTITIONS):
        # As many short ones as long ones; the first one is longer than what ends a connection.
        exponent = chance.uniform(math.log(_SHORTEST), math.log(_LONGEST))
        seconds = 30.0 if number == 0 else math.exp(exponent)
        fleet.network.cut(*directions(chance, 3))
        time.sleep(seconds)
        fleet.network.cut()
        took.append(fleet.current(_RECOVERED))
    fleet.check()
    took.sort()
    print(f"{PARTITIONS} partitions, {len(fleet.trainer.events)} sends; all workers current after")
    print(f"{took[len(took) // 2]:.2f} s (median), {took[-1]:.1f} s (most)")


def test_a_worker_whose_machine_is_gone(fleet: Fleet) -> None:
    if fleet.hosts != [1, 2]:
        pytest.skip("the trainer does not see the machines behind a relay")
    cut = time.monotonic()
    fleet.network.cut((0, 1), (1, 0))
    # For an answer that is on its way.
    time.sleep(1.0)
    fleet.workers[0].wait(fleet.has_what_was_answered(0), 10.0)
    fleet.workers[0].kill()
    noticed = fleet.trainer.wait(
        lambda event: event["time"] > cut and event.get("states", {}).get("0") == "lost", _NOTICED
    )
    # The sends after that do not wait for it.
    begun = len(fleet.trainer.events)
    later = fleet.trainer.wait(
        lambda event: event["event"] == "send" and event["updated"] == [1], 10.0, since=begun + 1
    )
    assert later["seconds"] < TIMEOUT / 2
    fleet.network.cut()
    events = fleet.workers[0].events
    fleet.workers[0] = fleet.start_worker(0)
    fleet.workers[0].wait(lambda event: event["event"] == "commit", _STARTED)
    fleet.workers[0].events[:0] = events
    fleet.current(_RECOVERED)
    fleet.check()
    print(f"noticed after {noticed['time'] - cut:.1f} s")


def test_a_trainer_whose_machine_is_gone(fleet: Fleet) -> None:
    if fleet.hosts != [1, 2]:
        pytest.skip("a relay on another host says that the trainer is lost")
    cut = time.monotonic()
    fleet.network.cut((0, 1), (1, 0), (0, 2), (2, 0))
    fleet.trainer.kill()
    for worker in fleet.workers:
        worker.wait(lambda event: event["event"] == "lost" and event["time"] > cut, _NOTICED)
        worker.wait(lambda event: event["event"] == "error" or event["time"] > cut, _NOTICED)


def test_disorder(fleet: Fleet) -> None:
    for disorder in (Disorder(overtaken=0.3), Disorder(lost=0.02, doubled=0.1, overtaken=0.2)):
        fleet.network.disorder = disorder
        for _ in range(10):
            fleet.current(_RECOVERED)
    fleet.network.disorder = Disorder()
    fleet.current(_RECOVERED)
    fleet.check()
