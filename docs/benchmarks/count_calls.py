"""Counts the calls of the project's functions in a small send and in a small receive.

    python docs/benchmarks/count_calls.py | python docs/benchmarks/page.py --record calls

The trainer and one worker are processes. Each counts with `sys.setprofile` in all of its threads,
from the beginning of the send or receive until the next one. The result is the least of 20 rounds,
after 19 for warm-up. If a worker answers before the trainer waits for it, there are some more
calls. `--list SCHEME` prints the functions of one scheme instead, with the mean number of calls of
each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from types import FrameType
from typing import Any

from sync_core import Receiver, Sender, SenderLostError
from sync_tools.bench import make_model

_SCHEMES = ("shm", "increments::chunked::dist")
_WARM_UP = 19
_ROUNDS = 20
# Calls that threads make after a send or receive count for it.
_AFTER = 0.02


class Calls:
    """Counts calls in this thread and in threads that start from now on."""

    def __init__(self) -> None:
        self.rounds: list[Counter[str]] = []
        self._now: Counter[str] = Counter()
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def next_round(self) -> None:
        """Begin the next round."""
        self._now = Counter()
        self.rounds.append(self._now)

    def end(self) -> None:
        """Stop counting."""
        self._now = Counter()
        threading.setprofile(None)
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("sync_"):
            self._now[f"{module}.{frame.f_code.co_qualname}"] += 1


def main() -> None:
    """Count and print the calls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", metavar="SCHEME")
    listed = parser.parse_args().list
    if listed is not None:
        for side, rounds in zip(("send", "receive"), count(listed), strict=True):
            total: Counter[str] = sum(rounds, Counter())
            print(f"{side}: {_fewest(rounds)}")
            for name, calls in total.most_common():
                print(f"{calls / _ROUNDS:6.1f} {name}")
        return
    print("| scheme | calls in a send | calls in a receive |\n|---|--:|--:|")
    for scheme in _SCHEMES:
        sent, received = map(_fewest, count(scheme))
        print(f"| {scheme} | {sent} | {received} |", flush=True)


def count(scheme: str) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Return the calls of each send and of each receive."""
    calls, context = Calls(), multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    model = make_model("small")
    *_, bias = model.parameters()
    with Sender(scheme, model, num_workers=1) as sender:
        worker = context.Process(target=_receive, args=(sender.address(0), theirs))
        worker.start()
        for number in range(_WARM_UP + _ROUNDS):
            bias.data.fill_(number)
            calls.next_round()
            sender.send()
            time.sleep(_AFTER)
        calls.end()
    received = mine.recv()
    worker.join()
    return calls.rounds[_WARM_UP:], received[_WARM_UP : _WARM_UP + _ROUNDS]


def _receive(address: Any, reply: Any) -> None:
    calls = Calls()
    with Receiver(address, make_model("small")) as receiver, suppress(SenderLostError):
        while True:
            calls.next_round()
            receiver.receive(60.0)
    calls.end()
    reply.send(calls.rounds)


def _fewest(rounds: list[Counter[str]]) -> int:
    return min(each.total() for each in rounds)


if __name__ == "__main__":
    main()
