"""A rank whose model FSDP2 shards reads its part of a run: python -m ... DIRECTORY RANK."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sync_core import Address, Receiver


def main(directory: Path, rank: int) -> None:
    url = (directory / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    address = Address.from_json((directory / "address").read_text())
    with Receiver(address, model) as receiver:
        version = receiver.receive(30.0)
    expected = torch.load(directory / "expected")
    equal = True
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        mine = expected[name].chunk(2)[rank]
        equal = equal and torch.equal(tensor.to_local(), mine)
    sys.stdout.write(f"version {version} equal {equal}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
