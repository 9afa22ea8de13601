"""A trainer sharded over two ranks by FSDP2 updates two tensor-parallel workers.

    torchrun --nproc-per-node=4 docs/examples/sharded_weights.py

Ranks 0 and 1 train, ranks 2 and 3 are the workers. No rank gathers the model: each rank of the
trainer sends its parts, and each worker receives the parts that it needs. Needs ``pip install
sync-plugin-scale sync-plugin-dist``.
"""

from __future__ import annotations

import pickle

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sync_core
from sync_plugin_scale import Sharded, gather_reports, join_addresses

TRAINERS, WORKERS, VERSIONS = 2, 2, 3


def make_policy() -> nn.Sequential:
    """Return the model, the same for all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def norm_of_output(policy: nn.Module) -> float:
    """Evaluate a sharded model; all of its ranks must call this."""
    with torch.no_grad():
        return float(policy(torch.ones(64)).norm())


def train(policy: nn.Module, mesh: DeviceMesh) -> None:
    """Run a rank of the trainer."""
    fully_shard(policy, mesh=mesh)
    rank, optimizer = mesh.get_local_rank(), torch.optim.SGD(policy.parameters(), lr=0.1)
    with sync_core.Sender(Sharded("dist", rank, TRAINERS), policy, num_workers=WORKERS) as sender:
        # Each worker needs an address from each rank; for workers of another job, use a file.
        own = [pickle.dumps(sender.address(i)) for i in range(WORKERS)]
        distributed.all_gather_object([None] * distributed.get_world_size(), own)
        for _ in range(VERSIONS):
            policy(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = gather_reports(sender.send(), group=mesh.get_group())
            output = norm_of_output(policy)
            if report is not None:  # on the first rank
                print(f"version {report.version}: workers {report.updated}, output {output:.4f}")


def act(policy: nn.Module, mesh: DeviceMesh) -> None:
    """Run a worker, until the trainer has ended."""
    parallelize_module(policy, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    gathered: list[list[bytes]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(gathered, [])
    worker_id = mesh.get_local_rank()
    addresses = [pickle.loads(of_rank[worker_id]) for of_rank in gathered[:TRAINERS]]
    with sync_core.Receiver(join_addresses(addresses), policy) as receiver:
        try:
            while True:
                receiver.receive()
                output = norm_of_output(policy)
                print(f"worker {worker_id}: version {receiver.version}, output {output:.4f}")
        except sync_core.SenderLostError:
            return


def main() -> None:
    """Run the trainer or a worker, depending on the rank from torchrun."""
    distributed.init_process_group("gloo")
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "rank"))
    role = train if distributed.get_rank() < TRAINERS else act
    role(make_policy(), world["rank"])
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
