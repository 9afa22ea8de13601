"""Measures how long a worker takes to plan its parts from each rank of a sharded trainer.

    python docs/benchmarks/planning.py | python docs/benchmarks/page.py --record planning

The trainer's ranks have rows of each matrix (FSDP) and the workers have columns (tensor parallel),
so each worker needs a part from each rank. ``plan`` decides which rank sends which part. ``join``
also combines all ranks' addresses, the request to each rank, and the layouts. All runs in one
thread. A check compares the sum of the planned parts with the worker's shard.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from sync_core import Address, Layout
from sync_core.models import Region
from sync_plugin_scale import Part, Sharded, join_addresses
from sync_plugin_scale.shards.endpoint import HeldTensor, Holding, RankEndpoint, ShardEndpoint
from sync_plugin_scale.shards.plan import plan_parts, size_of
from sync_plugin_scale.shards.receiver import join

MATRICES = 400
SHAPES = [(256 * (1 + i % 4), 64 * (1 + i // 4)) for i in range(8)]
CASES = ((4, 2), (64, 8), (256, 32))
_ROUNDS = 5


def piece(size: int, index: int, count: int) -> tuple[int, int]:
    """Return the bounds of one of several equal pieces."""
    return index * size // count, (index + 1) * size // count


def shapes() -> dict[str, tuple[int, int]]:
    """Return the names and shapes of all matrices."""
    return {f"layers.{i}.weight": SHAPES[i % len(SHAPES)] for i in range(MATRICES)}


def rows_of(rank: int, ranks: int) -> dict[str, Region]:
    """Return the regions that a rank of the trainer holds."""
    return {name: (piece(shape[0], rank, ranks), (0, shape[1])) for name, shape in shapes().items()}


def columns_of(worker: int, workers: int) -> dict[str, Region]:
    """Return the regions that a worker requests."""
    return {
        name: ((0, shape[0]), piece(shape[1], worker, workers)) for name, shape in shapes().items()
    }


def addresses(ranks: int) -> list[Address]:
    """Return the addresses of all ranks for worker 0; no process listens there."""
    layout = Layout.of_kinds((name, torch.bfloat16, shape) for name, shape in shapes().items())
    found = []
    for rank in range(ranks):
        tensors = tuple(
            HeldTensor(name, torch.bfloat16, region, shapes()[name])
            for name, region in rows_of(rank, ranks).items()
        )
        found.append(
            Address(
                scheme=Sharded("thread", rank, ranks),
                layers=(),
                layouts=(),
                options={},
                worker_id=0,
                model_id="policy",
                endpoint=ShardEndpoint((RankEndpoint("nowhere", Holding(rank, ranks, tensors)),)),
                token="",
                strategy="tensordict",
                zero_copy=False,
                cast=False,
                timeout=60.0,
                layout=layout,
                source_layout=layout,
            )
        )
    return found


def time_of(function: Any, *args: Any) -> float:
    """Return the CPU seconds of the fastest of several calls; other programs hardly matter."""
    seconds = []
    for _ in range(_ROUNDS):
        started = time.process_time()
        function(*args)
        seconds.append(time.process_time() - started)
    return min(seconds)


def measure(ranks: int, workers: int) -> tuple[float, float, int]:
    """Return the seconds of the plan and of joining, and the number of parts."""
    held: dict[str, list[tuple[int, Region]]] = {name: [] for name in shapes()}
    for rank in range(ranks):
        for name, region in rows_of(rank, ranks).items():
            held[name].append((rank, region))
    wanted = columns_of(0, workers)
    parts = plan_parts(held, wanted)
    for name, region in wanted.items():
        if sum(size_of(part.region) for part in parts[name]) != size_of(region):
            raise RuntimeError(f"the parts of {name} do not add up")
    every = addresses(ranks)
    model = {
        name: torch.zeros([stop - start for start, stop in region], dtype=torch.bfloat16)
        for name, region in wanted.items()
    }

    def join_all() -> None:
        join(join_addresses(every), Part(model, wanted))

    return time_of(plan_parts, held, wanted), time_of(join_all), sum(map(len, parts.values()))


def main() -> None:
    """Measure and print."""
    print(f"| from | to | matrices of {len(SHAPES)} shapes | parts | plan, CPU ms | join, CPU ms |")
    print("|--:|--:|--:|--:|--:|--:|")
    for ranks, workers in CASES:
        planned, joined, parts = measure(ranks, workers)
        figures = f"{MATRICES} | {parts:,} | {1e3 * planned:.0f} | {1e3 * joined:.0f}"
        print(f"| {ranks} | {workers} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
