"""Seven processes over gloo: four hold a trainer's model together, three are workers.

All of them run the same cases in the same order. Models are distributed by torch itself.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from sync_core import Receiver, Sender
from sync_core.models import Region
from sync_plugin_scale import Part, Sharded, gather_reports, join_addresses
from sync_plugin_scale.shards import local

TRAINERS, WORKERS = 4, 3
ROWS = (1, 3, 5, 7, 10)
TIMEOUT = 30.0


class Net(nn.Module):
    """Tensors of which ranks have uneven, empty and replicated shards."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rows = nn.ModuleDict({str(n): nn.Linear(4, n) for n in ROWS})
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 12, bias=False)
        self.across = nn.Linear(12, 5, bias=False)
        self.embedding = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("table", torch.randint(0, 99, (3,)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.embedding(x))
        return found


def _cut(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.shape == (5, 12) else None


def fsdp(ranks: list[int]) -> Callable[[nn.Module], None]:
    mesh = DeviceMesh("cpu", ranks)

    def shard(model: nn.Module) -> None:
        if distributed.get_rank() in ranks:
            fully_shard(model, mesh=mesh, shard_placement_fn=_cut)

    return shard


def hsdp(model: nn.Module) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    if distributed.get_rank() < TRAINERS:
        fully_shard(model, mesh=mesh)


def fsdp_over_tp(model: nn.Module) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    if distributed.get_rank() >= TRAINERS:
        return
    plan: dict[str, Any] = {f"rows.{n}": ColwiseParallel() for n in ROWS}
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


def chunk(shape: tuple[int, ...], rank: int, count: int) -> Region:
    """The part of a tensor-parallel worker: rows, or columns of what is wider than high."""
    axis = 1 if len(shape) == 2 and shape[1] > shape[0] else 0
    step = -(-shape[axis] // count)
    bounds = (min(rank * step, shape[axis]), min((rank + 1) * step, shape[axis]))
    return tuple(bounds if i == axis else (0, n) for i, n in enumerate(shape))


def worker_model(kind: str, worker: int, shard: Callable[[nn.Module], None]) -> tuple[Any, Any]:
    """The model of a worker, and its regions."""
    model = Net(seed=99)
    if kind == "whole":
        return model, None
    if kind == "fsdp 3":
        shard(model)
        return model, None
    count = int(kind.removeprefix("tp "))
    whole = model.state_dict()
    regions = {name: chunk(tuple(t.shape), worker, count) for name, t in whole.items() if t.dim()}
    tensors = {
        name: tensor[tuple(slice(*bounds) for bounds in regions[name])].clone()
        if name in regions
        else tensor.clone()
        for name, tensor in whole.items()
    }
    return tensors, regions


def check(model: Any, regions: Any, wanted: nn.Module, case: str) -> int:
    """Compare each tensor of a worker bit by bit; return how many were not empty."""
    compared = 0
    reference = wanted.state_dict()
    for name, shard in local.shards_of(model, regions).items():
        expected = reference[name][tuple(slice(*bounds) for bounds in shard.region)]
        assert torch.equal(shard.tensor, expected), (case, name, shard.region)
        compared += bool(expected.numel())
    return compared


TRAINER_KINDS: dict[str, tuple[int, Callable[[], Callable[[nn.Module], None]]]] = {
    "fsdp 1": (1, lambda: fsdp([0])),
    "fsdp 2": (2, lambda: fsdp([0, 1])),
    "fsdp 4": (4, lambda: fsdp([0, 1, 2, 3])),
    "hsdp 2x2": (4, lambda: hsdp),
    "fsdp 2 x tp 2": (4, lambda: fsdp_over_tp),
}
WORKER_KINDS = {"whole": 1, "tp 2": 2, "tp 3": 3, "fsdp 3": 3}
CASES = list(product(TRAINER_KINDS, WORKER_KINDS))


def double(model: nn.Module) -> None:
    """Multiply each tensor by two, tied ones once."""
    tensors = {s.tensor.data_ptr(): s.tensor for s in local.shards_of(model).values()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.mul_(2)


def run_case(trainer: str, worker: str, scheme: str, shard_worker: Any, trainers: Any) -> int:
    """Send two versions, and compare; return the number of tensors that were compared."""
    rank = distributed.get_rank()
    size, make = TRAINER_KINDS[trainer]
    num_workers = WORKER_KINDS[worker]
    shard = make()
    model = Net(seed=1)
    shard(model)
    sender = None
    if rank < size:
        if trainer == "fsdp 4":
            # The last forward leaves the parameters of the root whole.
            with torch.no_grad():
                model(torch.tensor([1]))
        sender = Sender(
            Sharded(scheme, rank, size), model, num_workers=num_workers, timeout=TIMEOUT
        )
    mine = None if sender is None else [sender.address(i) for i in range(num_workers)]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, mine)
    compared = 0
    if sender is not None:
        with sender:
            for step in (3, 8):
                if step == 8:
                    double(model)
                report = sender.send(version=step)
                assert report.version == step
                assert report.updated == tuple(range(num_workers)), report
                if size == TRAINERS:
                    merged = gather_reports(report, trainers)
                    assert (merged is None) == (rank > 0)
                    assert merged is None or merged.updated == report.updated
            distributed.barrier()
        return 0
    if TRAINERS <= rank < TRAINERS + num_workers:
        index = rank - TRAINERS
        target, regions = worker_model(worker, index, shard_worker)
        address = join_addresses([addresses[index] for addresses in reversed(gathered[:size])])
        with Receiver(address, Part(target, regions or {})) as receiver:
            expected = Net(seed=1)
            assert receiver.receive() == 3
            compared += check(target, regions, expected, f"{trainer} to {worker}")
            assert receiver.receive() == 8
            double(expected)
            compared += check(target, regions, expected, f"{trainer} to {worker}")
            distributed.barrier()
        return compared
    distributed.barrier()
    return 0


@contextmanager
def world(rank: int, port: int) -> Iterator[None]:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=TRAINERS + WORKERS)
    yield
    distributed.barrier()
    distributed.destroy_process_group()


def main(rank: int, port: int, results: Any) -> None:
    """Run all cases in one process of the world, and report."""
    found: dict[str, Any] = {}
    try:
        with world(rank, port):
            shard_worker = fsdp([4, 5, 6])
            trainers = distributed.new_group(list(range(TRAINERS)))
            for number, (trainer, worker) in enumerate(CASES):
                scheme = ("shm", "dist")[number % 2]
                found[f"{trainer} to {worker}"] = run_case(
                    trainer, worker, scheme, shard_worker, trainers
                )
            found["fallback"] = compare_fallback(rank)
    except BaseException:
        found["error"] = traceback.format_exc()
    results.put((rank, found))


def compare_fallback(rank: int) -> int:
    """Compare the regions that are computed here with those of torch; return how many."""
    compared = 0
    for _, make in TRAINER_KINDS.values():
        model = Net(seed=1)
        make()(model)
        for tensor in model.state_dict().values():
            if local.is_distributed(tensor):
                assert local._computed_region(tensor) == local.region_of(tensor), (
                    rank,
                    tensor.placements,
                    tensor.shape,
                )
                compared += 1
    return compared
