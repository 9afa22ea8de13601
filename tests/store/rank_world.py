"""Seven processes over gloo: four write a run together, three read it; torch cuts the models.

The models and their placements are those of `tests.end_to_end.shard_world`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tests.end_to_end.shard_world import (
    TRAINER_KINDS,
    TRAINERS,
    WORKER_KINDS,
    Net,
    check,
    double,
    fsdp,
    worker_model,
    world,
)
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from sync_core import Receiver, Sender
from sync_plugin_scale import Part, Sharded
from sync_plugin_store import Run
from sync_plugin_store.keys import SigningKey

TIMEOUT = 60.0


def by_hand(model: nn.Module) -> None:
    """Cut each parameter in another way, over two dimensions of ranks."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    if distributed.get_rank() >= TRAINERS:
        return
    kinds: list[list[Placement]] = [
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
        [Shard(1), Replicate()],
    ]
    for number, module in enumerate(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [
                p if isinstance(p, Shard) and p.dim < parameter.dim() else Replicate()
                for p in kinds[number % len(kinds)]
            ]
            cut = distribute_tensor(parameter.detach(), mesh, placements)
            module.register_parameter(name, nn.Parameter(cut))
    if isinstance(model, Net):
        model.head.weight = model.embedding.weight


KINDS: dict[str, tuple[int, Callable[[], Callable[[nn.Module], None]]]] = {
    **TRAINER_KINDS,
    "by hand": (4, lambda: by_hand),
}
CASES = [
    (trainer, worker, dtype)
    for (trainer, worker), dtype in product(
        product(KINDS, WORKER_KINDS), (torch.float32, torch.bfloat16)
    )
    if dtype == torch.float32 or (trainer in {"fsdp 4", "by hand"} and worker in {"whole", "tp 3"})
]


def name_of(case: tuple[str, str, torch.dtype]) -> str:
    trainer, worker, dtype = case
    return f"{trainer} to {worker}, {str(dtype).removeprefix('torch.')}"


def made(dtype: torch.dtype, seed: int = 1) -> Net:
    return Net(seed=seed).to(dtype)


def run_case(
    case: tuple[str, str, torch.dtype], directory: Path, shard_worker: Callable[[nn.Module], None]
) -> int:
    """Publish two versions, and compare; return how many tensors were compared."""
    trainer, worker, dtype = case
    rank = distributed.get_rank()
    size, make = KINDS[trainer]
    shard = make()
    model = made(dtype)
    shard(model)
    key, url = directory / "key.pem", str(directory / name_of(case).replace(" ", "-"))
    compared = 0
    if rank < size:
        scheme = Sharded("store", rank, size)
        with Sender(scheme, model, url=url, key=str(key), timeout=TIMEOUT) as sender:
            for version in (3, 8):
                if version == 8:
                    double(model)
                assert sender.send(version=version).version == version
                distributed.barrier()
                # Readers have it.
                distributed.barrier()
                if size == TRAINERS:
                    compared += compare_checkpoint(model, sender, dtype)
            distributed.barrier()
        return compared
    reader = None
    index = rank - TRAINERS
    expected = made(dtype)
    for version in (3, 8):
        distributed.barrier()
        if 0 <= index < WORKER_KINDS[worker]:
            if reader is None:
                target, regions = reader_model(worker, index, shard_worker, dtype)
                with Run(url, SigningKey.of_file(key).public) as run:
                    address = run.address()
                reader = Receiver(address, Part(target, regions) if regions else target)
            if version == 8:
                double(expected)
            assert reader.receive(TIMEOUT) == version
            compared += check(target, regions, expected, name_of(case))
        distributed.barrier()
    distributed.barrier()
    if reader is not None:
        reader.close()
    return compared


def reader_model(
    worker: str, index: int, shard: Callable[[nn.Module], None], dtype: torch.dtype
) -> tuple[Any, Any]:
    target, regions = worker_model(worker, index, shard)
    if isinstance(target, nn.Module):
        return target.to(dtype), regions
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in target.items()}, regions


def compare_checkpoint(model: nn.Module, sender: Sender, dtype: torch.dtype) -> int:
    """Compare what a reader on this rank gets with torch's own whole state, bit by bit."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    whole: dict[str, Any] = get_model_state_dict(model, options=options)
    copy = made(dtype, seed=99)
    with Receiver(sender.address(), copy) as reader:
        assert reader.receive(TIMEOUT) == sender.version
    if distributed.get_rank() == 0:
        # The others get an empty one.
        for name, tensor in copy.state_dict().items():
            assert torch.equal(tensor, whole[name]), name
    return len(copy.state_dict())


def main(rank: int, port: int, directory: Path, results: Any) -> None:
    """Run all cases in one process of the world, and report."""
    found: dict[str, Any] = {}
    try:
        with world(rank, port):
            shard_worker = fsdp([4, 5, 6])
            for case in CASES:
                found[name_of(case)] = run_case(case, directory, shard_worker)
    except BaseException:
        found["error"] = traceback.format_exc()
    results.put((rank, found))
