"""A trainer and two workers of torch RPC, in a world that this program starts.

    python docs/examples/torch_rpc.py

The workers need no code of sync-core: the sender finds each worker's model by its path.
"""

from __future__ import annotations

import os
import socket

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc

import sync_core

WORKERS = ["worker0", "worker1"]

policy = nn.Linear(4, 2)


def main() -> None:
    """Start the world, with a process for each member."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    names = ["trainer", *WORKERS]
    mp.spawn(join, args=(names, port), nprocs=len(names))


def join(rank: int, names: list[str], port: int) -> None:
    """Run one member of the world; the first one trains."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names))
    if rank == 0:
        train()
    # Returns after all members have called it; until then the workers execute calls.
    rpc.shutdown()


def train() -> None:
    """Send three versions, and check the workers' weights."""
    path = f"{join.__module__}:policy"
    with sync_core.Sender("rpc", policy, workers=WORKERS, model_id=path) as sender:
        for step in range(3):
            with torch.no_grad():
                policy.bias.fill_(step)
            report = sender.send()
            print(f"version {report.version}: workers {report.updated}")
    for name in WORKERS:
        print(f"{name}: bias {rpc.rpc_sync(name, bias)}")


def bias() -> list[float]:
    """Return the bias of this process's policy."""
    values: list[float] = policy.bias.tolist()
    return values


if __name__ == "__main__":
    main()
