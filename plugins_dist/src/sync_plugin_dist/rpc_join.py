"""Joining a local RPC world through the trainer's store."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._distributed_c10d import Store
from torch._C._distributed_rpc import _is_current_rpc_agent_set
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

_SCHEME = "sync-rpc"

# What TensorPipe, and the Gloo that it begins with, take for "listen on this interface": a peer
# that can connect to RPC can run code.
_INTERFACE = {"TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

# TCP alone. Through its shared memory, TensorPipe notifies a process by a queue that a peer locks:
# one that is stopped (SIGSTOP) while it does keeps all others out. And every process polls its
# queue without a pause.
# https://github.com/pytorch/tensorpipe/blob/main/tensorpipe/transport/shm/reactor.cc
_TRANSPORTS = ["uv"]


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's place in a world.

    Args:
        name: by which the others call it.
        rank: 0 for the trainer.
        world_size: how many there are, the trainer included.
        attempt: how many times the trainer's process has called `rpc.init_rpc` before.
        timeout: deadline in seconds for the others to join, and for calls that set no other.
    """

    name: str
    rank: int
    world_size: int
    attempt: int
    timeout: float

    @property
    def key(self) -> str:
        """Return what the store has once the process is there."""
        return f"there/{self.rank}"


def attempts() -> int:
    """Return how many times this process has called `rpc.init_rpc`."""
    # torch tells it to no one, and puts it into the names of the keys under which processes meet.
    return int(rpc._init_counter)


def initialised() -> bool:
    """Return whether RPC runs in this process."""
    return bool(_is_current_rpc_agent_set())


def join(store: Store, seat: Seat) -> None:
    """Say that this process is there, and take part in RPC once all others are.

    Raises:
        RuntimeError: they were not within the seat's timeout.
    """
    store.set(seat.key, "")
    _stores.append(store)
    # torch counts worlds, and what was gathered in worlds of these names, in each process, and
    # meets others under the numbers: those of a fresh process and of an older one would differ.
    rpc._init_counter = seat.attempt
    rpc.api._all_gather_sequence_id.clear()
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=seat.timeout, init_method=f"{_SCHEME}://", _transports=_TRANSPORTS
    )
    with _on_loopback(), warnings.catch_warnings():
        # What torch says to itself.
        warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup")
        rpc.init_rpc(
            seat.name,
            rank=seat.rank,
            world_size=seat.world_size,
            rpc_backend_options=options,
        )


@contextmanager
def _on_loopback() -> Iterator[None]:
    # The user may have named another one, on a machine where this name is wrong.
    ours = _INTERFACE - os.environ.keys()
    os.environ.update(dict.fromkeys(ours, _LOOPBACK))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


# Stores on their way to `rpc.init_rpc`, which takes none but by the name of a way to get one.
_stores: list[Store] = []


def _hand_over(url: str) -> Iterator[tuple[Store, int, int]]:
    # torch keeps this generator for good. It must not keep the store, which holds a port.
    query = dict(pair.split("=") for pair in url.partition("?")[2].split("&"))
    yield _stores.pop(), int(query["rank"]), int(query["world_size"])


register_rendezvous_handler(_SCHEME, _hand_over)
