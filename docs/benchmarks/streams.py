"""Compares gathering a model from four FSDP2 ranks tensor by tensor and as a whole.

    python docs/benchmarks/streams.py | python docs/benchmarks/page.py --record streams

``stream``: ``gathered(model)``, which gathers one tensor, packs it, and gathers the next.
``whole``: all tensors are gathered before the first is packed. The worker is one process. The time
is from a barrier of the ranks until all have sent the version; ``first byte`` is when the worker
learned of the version, by its own report. Memory is the peak beyond a rank's memory before the
first send, divided by the size of the model; each process counts its share of shared pages. The
worker compares every element after the last send.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from shards import Memory
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sync_core import Receiver, Sender, gathered
from sync_core.models import ComputedWeights, tensors_of_rank
from sync_plugin_scale import Chunked

RANKS = 4
# The tensors of SmolLM2-135M, whose output layer shares the embedding.
WIDTH, INNER, KEYS, LAYERS, WORDS = 576, 1536, 192, 30, 49152
_WARM_UP = 2
_SCHEMES: dict[str, Any] = {
    "shm": "shm",
    "chunked::shm": Chunked("shm", mb=4),
    "dist over gloo": "dist",
}
_OPTIONS: dict[str, dict[str, Any]] = {"dist over gloo": {"shared_memory": False}}


class Whole(ComputedWeights):
    """All tensors of a model, gathered before the first is packed."""

    def read(self, strategy: Any) -> dict[str, torch.Tensor]:
        """Gather all tensors."""
        return {
            name: tensor.full_tensor()  # type: ignore[attr-defined]
            for name, tensor in tensors_of_rank(self.model, strategy).items()
        }


class Block(nn.Module):
    """The tensors of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(torch.empty(WIDTH) for _ in range(2))
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEYS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)


class Net(nn.Module):
    """The tensors of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.empty(WIDTH))


def empty() -> nn.Module:
    """Return a model without memory."""
    with torch.device("meta"):
        return Net().to(torch.bfloat16)


@dataclass(frozen=True)
class Run:
    """The task of one rank, and the file for its results."""

    way: str
    scheme: str
    rounds: int
    pipe: Any
    results: Any


def trainer(rank: int, run: Run) -> None:
    """Run one rank of the trainer."""
    model = empty()
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        parameter.detach().fill_(number % 61)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    weights = gathered(model) if run.way == "stream" else Whole(model)
    # Both ways find the model's tensors first, so that this memory does not count for a send.
    distributed.barrier()
    memory = Memory()
    with Sender(
        _SCHEMES[run.scheme], weights, num_workers=int(rank == 0), **_OPTIONS.get(run.scheme, {})
    ) as sender:
        if rank == 0:
            run.pipe.put(sender.address(0))
        seconds, first, peak = [], [], 0
        for version in range(1, _WARM_UP + run.rounds + 1):
            if version == _WARM_UP + 1:
                peak = memory.peak()
            for parameter in model.parameters():
                parameter.detach().add_(1)
            distributed.barrier()
            started = time.perf_counter()
            report = sender.send(version=version)
            distributed.barrier()
            seconds.append(time.perf_counter() - started)
            for result in report.workers.values():
                after = result.stage_seconds + result.pause_seconds + result.acknowledge_seconds
                first.append(result.seconds - after)
    run.results.put(
        (rank, median(seconds[_WARM_UP:]), median(first[_WARM_UP:] or [0.0]), peak / nbytes)
    )


def worker(versions: int, pipe: Any, results: Any) -> None:
    """Run the worker."""
    torch.set_num_threads(1)
    model = empty().to_empty(device="cpu")
    with Receiver(pipe.get(timeout=120), model) as receiver:
        for version in range(1, versions + 1):
            if receiver.receive() != version:
                raise RuntimeError(f"version {version} did not come")
    for number, parameter in enumerate(model.parameters()):
        if parameter.unique().tolist() != [number % 61 + versions]:
            raise RuntimeError(f"parameter {number} is not what was sent")
    results.put((RANKS, 0.0, 0.0, 0.0))


def _run(rank: int, folder: str, run: Run) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=folder, rank=rank, world_size=RANKS)
    trainer(rank, run)
    distributed.destroy_process_group()


def measure(way: str, scheme: str, rounds: int) -> dict[str, float]:
    """Run one way in new processes."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        folder = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    results, pipe = context.Queue(), context.Queue()
    run = Run(way, scheme, rounds, pipe, results)
    processes = [
        context.Process(target=_run, args=(rank, folder, run), daemon=True) for rank in range(RANKS)
    ]
    processes.append(
        context.Process(target=worker, args=(_WARM_UP + rounds, pipe, results), daemon=True)
    )
    for process in processes:
        process.start()
    try:
        found = {row[0]: row[1:] for row in (results.get(timeout=300) for _ in processes)}
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return {
        "seconds": max(found[rank][0] for rank in range(RANKS)),
        "first": found[0][1],
        "sending": found[0][2],
        "others": max(found[rank][2] for rank in range(1, RANKS)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="+", choices=_SCHEMES, default=list(_SCHEMES))
    parser.add_argument(
        "--ways", nargs="+", choices=["stream", "whole"], default=["stream", "whole"]
    )
    arguments = parser.parse_args()
    print("| scheme | way | ms | first byte, ms | memory of the rank that sends / model | ", end="")
    print("memory of another rank / model |")
    print("|---|---|--:|--:|--:|--:|")
    for scheme, way in product(arguments.schemes, arguments.ways):
        found = measure(way, scheme, arguments.rounds)
        print(
            f"| {scheme} | {way} | {1e3 * found['seconds']:.0f} | {1e3 * found['first']:.0f} | "
            f"{found['sending']:.2f} | {found['others']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
