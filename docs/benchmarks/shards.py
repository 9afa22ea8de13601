"""Measures updates from four FSDP2 ranks to two tensor-parallel ranks, all on this machine.

    python docs/benchmarks/shards.py | python docs/benchmarks/page.py --record shards

``sharded``: each rank sends its shards by ``Sender(Sharded(scheme, rank, 4), …)``. ``gathered``:
every rank gathers the whole model, and the first sends it to both workers, which take their parts.
In both, the time is from a barrier of the trainer's ranks until all have sent the version. Every
element is compared after the last send. Memory is the largest peak of a rank beyond its memory
before the first send, divided by the size of a rank's shard. It is sampled during the first sends,
which are not timed.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sync_core import Receiver, Sender, gathered
from sync_core.models import Region
from sync_plugin_scale import Part, Sharded, join_addresses
from sync_plugin_scale.shards.local import shards_of

TRAINERS, WORKERS = 4, 2
WIDTH, INNER, LAYERS, WORDS = 1024, 2752, 8, 8000
_WARM_UP = 3
#: The way, the scheme, and the number of rounds.
Arguments: TypeAlias = tuple[str, str, int]
_COLUMNS = {"q": 0, "gate": 0, "up": 0, "o": 1, "down": 1, "emb": 0}
_OPTIONS: dict[str, dict[str, Any]] = {
    "shm": {},
    "dist": {},
    "dist over gloo": {"shared_memory": False},
}


class Block(nn.Module):
    """The tensors of a layer of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)


class Net(nn.Module):
    """The tensors of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)


def empty() -> nn.Module:
    """Return a model without memory."""
    with torch.device("meta"):
        return Net().to(torch.bfloat16)


def part(name: str, shape: torch.Size, worker: int) -> Region:
    """Return the region that a tensor-parallel worker has."""
    axis = _COLUMNS.get(name.split(".")[-2])
    return tuple(
        (worker * size // WORKERS, (worker + 1) * size // WORKERS) if i == axis else (0, size)
        for i, size in enumerate(shape)
    )


def values(number: int, region: Region) -> Tensor:
    """Return elements by position and tensor; adding a version number keeps them exact."""
    found = torch.tensor(number)
    for axis, (start, stop) in enumerate(region):
        shape = [-1 if i == axis else 1 for i in range(len(region))]
        found = found + (3 * axis + 1) * torch.arange(start, stop).view(shape)
    return (found % 61).to(torch.bfloat16)


def trainer(rank: int, arguments: Arguments, pipes: Any, results: Any, group: Any) -> None:
    """Run one rank of the trainer."""
    way, scheme, rounds = arguments
    model = empty()
    mesh = DeviceMesh("cpu", list(range(TRAINERS)))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    shards = shards_of(model)
    for number, shard in enumerate(shards.values()):
        shard.tensor.detach().copy_(values(number, shard.region))
    shard_nbytes = sum(shard.tensor.nbytes for shard in shards.values())
    kind = scheme.partition(" ")[0]
    memory = Memory()
    if way == "sharded":
        sender: Any = Sender(
            Sharded(kind, rank, TRAINERS), model, num_workers=WORKERS, **_OPTIONS[scheme]
        )
    else:
        count = 0 if rank else WORKERS
        sender = Sender(kind, gathered(model), num_workers=count, **_OPTIONS[scheme])
    with sender:
        pipes.put((rank, [sender.address(i) for i in sender.all_worker_ids()]))
        seconds, nbytes, peak = [], 0, 0
        for version in range(1, _WARM_UP + rounds + 1):
            if version == _WARM_UP + 1:
                peak = memory.peak()
            for shard in shards.values():
                shard.tensor.detach().add_(1)
            distributed.barrier(group)
            started = time.perf_counter()
            nbytes = sender.send(version=version).nbytes
            distributed.barrier(group)
            seconds.append(time.perf_counter() - started)
        results.put(("trainer", rank, median(seconds[_WARM_UP:]), nbytes, peak, shard_nbytes))
        distributed.barrier()


def worker(index: int, way: str, rounds: int, pipes: Any, results: Any) -> None:
    """Run one tensor-parallel rank of the worker."""
    shapes = {name: tensor.shape for name, tensor in empty().state_dict().items()}
    regions = {name: part(name, shape, index) for name, shape in shapes.items()}
    addresses = dict(pipes.get() for _ in range(TRAINERS))
    mine = {
        name: torch.zeros([stop - start for start, stop in region], dtype=torch.bfloat16)
        for name, region in regions.items()
    }
    shard_nbytes = sum(tensor.nbytes for tensor in mine.values())
    memory = Memory()
    if way == "sharded":
        joined = join_addresses([found[index] for found in addresses.values()])
        receiver = Receiver(joined, Part(mine, regions))
    else:
        whole = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        receiver = Receiver(addresses[0][index], whole)
    with receiver:
        peak = 0
        for version in range(1, _WARM_UP + rounds + 1):
            if version == _WARM_UP + 1:
                peak = memory.peak()
            if receiver.receive() != version:
                raise RuntimeError(f"version {version} did not come")
            if way != "sharded":
                for name, region in regions.items():
                    mine[name].copy_(whole[name][tuple(slice(*bounds) for bounds in region)])
        for number, name in enumerate(shapes):
            if not torch.equal(mine[name], values(number, regions[name]) + version):
                raise RuntimeError(f"{name} is not what was sent")
        results.put(("worker", index, 0.0, 0, peak, shard_nbytes))
        distributed.barrier()


class Memory:
    """Samples this process's memory every 2 ms: private memory and a share of shared memory."""

    def __init__(self) -> None:
        self._before = self._peak = _memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def peak(self) -> int:
        """Return the peak beyond the memory at the start, in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak - self._before

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self._peak = max(self._peak, _memory())


def _memory() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _run(
    rank: int, folder: str, arguments: tuple[str, str, int], queues: Any, results: Any
) -> None:
    torch.set_num_threads(1)
    way, _, rounds = arguments
    size = TRAINERS + WORKERS
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=folder, rank=rank, world_size=size)
    DeviceMesh("cpu", list(range(TRAINERS)))
    group = distributed.new_group(list(range(TRAINERS)))
    if rank < TRAINERS:
        trainer(rank, arguments, _Both(queues), results, group)
    else:
        worker(rank - TRAINERS, way, rounds, queues[rank - TRAINERS], results)
    distributed.destroy_process_group()


class _Both:
    def __init__(self, queues: Any) -> None:
        self._queues = queues

    def put(self, item: Any) -> None:
        for queue in self._queues:
            queue.put(item)


def measure(way: str, scheme: str, rounds: int) -> dict[str, Any]:
    """Run one way in new processes."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        folder = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    results, queues = context.Queue(), [context.Queue() for _ in range(WORKERS)]
    processes = [
        context.Process(
            target=_run, args=(rank, folder, (way, scheme, rounds), queues, results), daemon=True
        )
        for rank in range(TRAINERS + WORKERS)
    ]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=240) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    trainers = [row for row in found if row[0] == "trainer"]
    workers = [row for row in found if row[0] == "worker"]
    model = sum(row[5] for row in trainers)
    return {
        "seconds": max(row[2] for row in trainers),
        "wire": sum(row[3] for row in trainers) / model,
        "most": max(row[3] for row in trainers) / (model / TRAINERS),
        "trainers": max(row[4] / row[5] for row in trainers),
        "workers": max(row[4] / row[5] for row in workers),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemes", nargs="+", choices=_OPTIONS, default=list(_OPTIONS))
    parser.add_argument("--ways", nargs="+", default=["sharded", "gathered"])
    arguments = parser.parse_args()
    print("| scheme | way | ms | bytes sent / model | most of one rank / its share | ", end="")
    print("memory of a trainer's rank / shard | memory of a worker / shard |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for scheme, way in product(arguments.schemes, arguments.ways):
        found = measure(way, scheme, arguments.rounds)
        figures = [f"{found[name]:.2f}" for name in ("wire", "most", "trainers", "workers")]
        print(f"| {scheme} | {way} | {1e3 * found['seconds']:.0f} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
