"""The time of a version to the last of eight hosts, over links of limited bandwidth.

    python docs/benchmarks/relays.py | python docs/benchmarks/page.py --record relays

The scheme of `tests/core/slow_links.py` waits as long as the bytes of a payload would take over
the link of its sender. ``direct``: the sender has eight workers. ``chain``: one relay on each
host, in a row, each with a worker beside it. ``tree``: each relay has two others.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sync_core import Address, Receiver, Relay, Sender

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.core.slow_links import SlowLinks

HOSTS = 8


def direct(opened: ExitStack, policy: dict[str, torch.Tensor], rate: float) -> tuple[Any, Any]:
    """Every host is a worker of the sender."""
    sender = Sender(SlowLinks(), policy, num_workers=HOSTS, rate=rate)
    opened.enter_context(sender)
    return sender, [sender.address(i) for i in range(HOSTS)]


def chain(opened: ExitStack, policy: dict[str, torch.Tensor], rate: float) -> tuple[Any, Any]:
    """Each host passes the version on to the next."""
    sender = Sender(SlowLinks(), policy, num_workers=1, chunk_mb=_chunk_mb(policy), rate=rate)
    opened.enter_context(sender)
    address, found = sender.address(0), []
    for _ in range(HOSTS - 1):
        relay = opened.enter_context(Relay(address, num_workers=2, local=(1,)))
        address = relay.address(0)
        found.append(relay.address(1))
    return sender, [*found, address]


def tree(opened: ExitStack, policy: dict[str, torch.Tensor], rate: float) -> tuple[Any, Any]:
    """Each host passes the version on to two others."""
    sender = Sender(SlowLinks(), policy, num_workers=2, chunk_mb=_chunk_mb(policy), rate=rate)
    opened.enter_context(sender)
    open_ones = [sender.address(i) for i in range(2)]
    found: list[Address] = []
    while len(found) < HOSTS:
        address = open_ones.pop(0)
        # The hosts of the last row have nothing to pass on.
        if len(found) + len(open_ones) + 1 >= HOSTS:
            found.append(address)
            continue
        relay = opened.enter_context(Relay(address, num_workers=3, local=(2,)))
        open_ones += [relay.address(0), relay.address(1)]
        found.append(relay.address(2))
    return sender, found


def _chunk_mb(policy: dict[str, torch.Tensor]) -> float:
    return sum(tensor.nbytes for tensor in policy.values()) / 64e6


def measure(make: Any, nbytes: int, rate: float, rounds: int) -> float:
    """Seconds from the send until the last worker has the version, over those of one link."""
    policy = {str(i): torch.randn(nbytes // 32) for i in range(8)}
    with ExitStack() as opened:
        sender, addresses = make(opened, policy, rate)
        models = [{n: torch.zeros_like(t) for n, t in policy.items()} for _ in addresses]
        pairs = zip(addresses, models, strict=True)
        receivers = [opened.enter_context(Receiver(a, m)) for a, m in pairs]
        seconds = []
        for _ in range(rounds):
            policy["0"].add_(1)
            threads = [threading.Thread(target=receiver.receive) for receiver in receivers]
            for thread in threads:
                thread.start()
            started = time.perf_counter()
            sender.send()
            seconds.append(time.perf_counter() - started)
            for thread in threads:
                thread.join()
            if not all(torch.equal(model["0"], policy["0"]) for model in models):
                raise RuntimeError("a worker has not what was sent")
    return median(seconds) / (nbytes / rate)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=40.0)
    parser.add_argument("--rate", type=float, default=8.0, help="MB per second")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    nbytes, rate = int(arguments.mb * 1e6), arguments.rate * 1e6
    print("| way | time to the last of 8 hosts / time of one link |")
    print("|---|--:|")
    for make in (direct, chain, tree):
        print(f"| {make.__name__} | {measure(make, nbytes, rate, arguments.rounds):.2f} |")


if __name__ == "__main__":
    main()
