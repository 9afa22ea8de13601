"""A trainer at rank 0 keeps copies of a model up to date at all other ranks.

Run it by: torchrun --nproc-per-node=3 docs/examples/torchrun_weights.py
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed, nn

import sync_core


def train(policy: nn.Module, versions: int, backend: str, topology: str, host: str) -> None:
    """Send some versions; when `send` returns, every worker has the version."""
    num_workers = distributed.get_world_size() - 1
    with sync_core.Sender(
        "dist", policy, num_workers=num_workers, backend=backend, topology=topology, host=host
    ) as sender:
        # Any other way to pass an address to its worker also works: a file, a queue, an RPC.
        addresses = [None, *map(sender.address, range(num_workers))]
        distributed.scatter_object_list([None], addresses, src=0)
        for value in range(1, versions + 1):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.fill_(value)
            report = sender.send()
            print(f"version {report.version}: workers {report.updated} in {report.seconds:.4f} s")


def act(policy: nn.Module) -> None:
    """Commit each version until the trainer has finished."""
    own: list[sync_core.Address] = [None]  # type: ignore[list-item]
    distributed.scatter_object_list(own, None, src=0)
    receiver = sync_core.Receiver(own[0], policy)
    try:
        while True:
            receiver.receive()
    except sync_core.SenderLostError:
        weight = next(policy.parameters()).flatten()[0].item()
        print(f"rank {distributed.get_rank()}: version {receiver.version}, weights {weight}")


def main() -> None:
    """Run the trainer or a worker, depending on the rank from torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--topology", default="p2p")
    parser.add_argument("--host", default="127.0.0.1", help="the trainer's address for the others")
    arguments = parser.parse_args()
    # The script uses this group only for itself; sync-core does not need it.
    distributed.init_process_group("gloo")
    policy = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    if distributed.get_rank() == 0:
        train(policy, arguments.versions, arguments.backend, arguments.topology, arguments.host)
    else:
        act(policy)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
