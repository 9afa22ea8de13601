"""A trainer sharded over two ranks by FSDP2 publishes versions; any program can read them whole.

    torchrun --nproc-per-node=2 docs/examples/sharded_run.py train /tmp/run trainer.pem
    python docs/examples/sharded_run.py read /tmp/run KEY

No rank gathers the model, and no rank knows the readers. ``/tmp/run`` may be a bucket, such as
``s3://bucket/run``. All ranks sign with the key in ``trainer.pem``, which is created if it does not
exist. The trainer prints the public key, ``KEY``, for readers. Needs ``pip install
sync-plugin-store``.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sync_core
from sync_plugin_scale import Sharded
from sync_plugin_store import Run

VERSIONS = 3


def make_policy(seed: int) -> nn.Sequential:
    """Return the model, the same for all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def norm_of_output(policy: nn.Module) -> float:
    """Evaluate the model; if it is sharded, all ranks must call this."""
    with torch.no_grad():
        return float(policy(torch.ones(64)).norm())


def train(url: str, key: str) -> None:
    """Run a rank of the trainer."""
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    policy = make_policy(seed=0)
    fully_shard(policy, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with sync_core.Sender(Sharded("store", rank, size), policy, url=url, key=key) as sender:
        for _ in range(VERSIONS):
            policy(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sender.send()  # returns when readers can find the version
            output = norm_of_output(policy)
            if rank == 0:
                print(f"version {report.version}: output {output:.4f}")
        if rank == 0:
            print(f"key {Run.key_of(sender)}")
    distributed.destroy_process_group()


def read(url: str, key: str) -> None:
    """Run a reader of the newest version."""
    policy = make_policy(seed=1)
    with Run(url, key) as run:
        address = run.address()
    with sync_core.Receiver(address, policy) as receiver:
        print(f"reader: version {receiver.receive()}, output {norm_of_output(policy):.4f}")


def main() -> None:
    """Train, or read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["train", "read"])
    parser.add_argument("url")
    parser.add_argument("key", help="the trainer's key file, or its public key")
    arguments = parser.parse_args()
    role = train if arguments.role == "train" else read
    role(arguments.url, arguments.key)


if __name__ == "__main__":
    main()
