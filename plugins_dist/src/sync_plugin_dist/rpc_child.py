"""A worker process of a local RPC world, seen from inside: it joins, and waits for the end."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from sync_plugin_dist.rpc_host import forget_all
from sync_plugin_dist.rpc_join import Seat, join


@dataclass(frozen=True, slots=True)
class Place:
    """The arguments of a worker process.

    Args:
        seat: its place in the world.
        port: where the trainer's store listens.
        torch_threads: at most so many threads for torch.
    """

    seat: Seat
    port: int
    torch_threads: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        fields = json.loads(text)
        return cls(**{**fields, "seat": Seat(**fields["seat"])})


def main(lifeline: int, place: str) -> None:
    """Serve until the trainer says otherwise, or dies.

    Args:
        lifeline: a file descriptor; the trainer keeps its other end open as long as it lives, and
            writes to it when this process is to end.
        place: a `Place` as JSON.
    """
    _serve(lifeline, Place.from_json(place))


def _serve(lifeline: int, place: Place) -> None:
    # What this process starts must not hold it.
    os.set_inheritable(lifeline, False)
    ending = threading.Event()
    # A thread, so that not even joining keeps this process alive without its parent.
    threading.Thread(
        target=_watch, args=(lifeline, ending), name="sync lifeline", daemon=True
    ).start()
    # OMP_NUM_THREADS may ask for fewer.
    torch.set_num_threads(min(place.torch_threads, torch.get_num_threads()))
    timeout = timedelta(seconds=place.seat.timeout)
    join(TCPStore("127.0.0.1", place.port, timeout=timeout), place.seat)
    ending.wait()
    # The parent ends this process by force if that takes too long.
    forget_all()


def _watch(lifeline: int, ending: threading.Event) -> None:
    while os.read(lifeline, 1):
        ending.set()
    os._exit(1)
