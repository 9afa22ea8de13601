"""A worker process of a local RPC world, seen from inside: it joins, and waits for the end."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from sync_plugin_dist.rpc_join import Seat, join


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker process is told when it starts.

    Args:
        seat: its place in the world.
        port: where the trainer's store listens.
        torch_threads: at most so many threads for torch.
        lifeline: a file descriptor; the trainer keeps its other end open as long as it lives, and
            writes to it when this process is to end.
    """

    seat: Seat
    port: int
    torch_threads: int
    lifeline: int = -1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        fields = json.loads(text)
        return cls(**{**fields, "seat": Seat(**fields["seat"])})


def main(place: str) -> None:
    """Serve until the trainer says otherwise, or dies.

    Args:
        place: a `Place` as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _serve(Place.from_json(place))
    # What a program is promised at its end, without taking its modules apart: that does nobody
    # any good, and takes torch half a second. No public function runs the exit handlers.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(place: Place) -> None:
    # What this process starts must not hold it.
    os.set_inheritable(place.lifeline, False)
    ending = threading.Event()
    # A thread, so that not even joining keeps this process alive without its parent.
    threading.Thread(
        target=_watch, args=(place.lifeline, ending), name="sync lifeline", daemon=True
    ).start()
    # OMP_NUM_THREADS may ask for fewer.
    torch.set_num_threads(min(place.torch_threads, torch.get_num_threads()))
    timeout = timedelta(seconds=place.seat.timeout)
    join(TCPStore("127.0.0.1", place.port, timeout=timeout), place.seat)
    ending.wait()


def _watch(lifeline: int, ending: threading.Event) -> None:
    while os.read(lifeline, 1):
        ending.set()
    os._exit(1)
