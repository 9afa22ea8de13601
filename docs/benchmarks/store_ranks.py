r"""Measures the bytes that readers of shards read from a run of one process or of several ranks.

    python docs/benchmarks/store_ranks.py | python docs/benchmarks/page.py --record store-ranks

``small``: one layer of SmolLM2-135M and an embedding of 1,024 rows, in bfloat16 (9 MB).
``SmolLM2-135M``: the whole model (269 MB). The trainer is one process, or four ranks (in threads
here). Each rank holds a quarter of the rows of each tensor, as with FSDP2, or of the columns;
one-dimensional tensors are split too. Readers hold rows or columns in the same way, or the whole
model. All read by HTTP. Each reader compares every element.

Prints a table: the seconds to publish a version into the directory, the median of three after the
first; the bytes of a shard; the bytes sent to the last but one of the readers, including the head,
the manifest and the lists of chunks; and the number of requests. A reader's first version costs one
more request, for the list of the ranks' parts. The default takes about a minute.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from store import Server, weights
from torch import Tensor

from sync_core import Address, Receiver, Sender
from sync_core.models import Region
from sync_plugin_scale import Part, Sharded

_COLUMNS = "model | written by | publish, s | reader | shard, MB | read / shard | requests"
_VERSIONS = 4
_READERS = {
    "rows of 2": (0, 2),
    "rows of 4": (0, 4),
    "rows of 8": (0, 8),
    "columns of 4": (1, 4),
    "whole": (0, 1),
}
_TRAINERS = {"one process": (0, 1), "rows of 4 ranks": (0, 4), "columns of 4 ranks": (1, 4)}


def main() -> None:
    """Measure each reader of each trainer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=models(), default=list(models()))
    arguments = parser.parse_args()
    print(f"| {_COLUMNS} |")
    print("|---|---|--:|---" + "|--:" * 3 + "|")
    for name in arguments.models:
        model = models()[name]
        for trainer, (axis, size) in _TRAINERS.items():
            with tempfile.TemporaryDirectory() as folder:
                directory = Path(folder) / "run"
                with published(model, directory, axis, size) as (address, seconds):
                    for reader, cut in _READERS.items():
                        figures = row(model, address, cut)
                        print(f"| {name} | {trainer} | {seconds:.3f} | {reader} | {figures} |")


def models() -> dict[str, dict[str, Tensor]]:
    """Return the models by name."""
    whole = weights()
    names = [name for name in whole if name.startswith(("layers.0.", "norm"))]
    small = {"embed": whole["embed"][:1024].clone(), **{name: whole[name] for name in names}}
    return {"small": small, "SmolLM2-135M": whole}


def region_of(shape: tuple[int, ...], axis: int, rank: int, size: int) -> Region:
    """Return the part of a tensor that a rank has; one-dimensional tensors have only rows."""
    axis = min(axis, len(shape) - 1)
    step = -(-shape[axis] // size)
    bounds = (min(rank * step, shape[axis]), min((rank + 1) * step, shape[axis]))
    return tuple(bounds if i == axis else (0, n) for i, n in enumerate(shape))


def take(tensor: Tensor, region: Region) -> Tensor:
    """Return the part of a tensor."""
    return tensor[tuple(slice(*bounds) for bounds in region)]


@contextmanager
def published(
    model: dict[str, Tensor], directory: Path, axis: int, size: int
) -> Iterator[tuple[Address, float]]:
    """Publish versions from several ranks; return an address, and the seconds of one version."""
    key = str(directory.with_name("key.pem"))
    options = {"url": str(directory), "key": key, "chunks": True}
    with ExitStack() as ends:
        if size == 1:
            senders = [Sender("store", model, **options)]
        else:
            senders = []
            for rank in range(size):
                regions = {n: region_of(tuple(t.shape), axis, rank, size) for n, t in model.items()}
                held = {name: take(model[name], region) for name, region in regions.items()}
                scheme = Sharded("store", rank, size, regions=regions)
                senders.append(Sender(scheme, held, **options))
        for sender in senders:
            ends.callback(sender.close)
        found = []
        with ThreadPoolExecutor(size) as pool:
            for _ in range(_VERSIONS):
                for tensor in model.values():
                    tensor.add_(1)
                began = time.perf_counter()
                list(pool.map(Sender.send, senders))
                found.append(time.perf_counter() - began)
        yield senders[0].address(), median(found[1:])


def row(model: dict[str, Tensor], address: Address, cut: tuple[int, int]) -> str:
    """Return the figures of a reader."""
    axis, size = cut
    rank = max(0, size - 2)
    regions = {name: region_of(tuple(t.shape), axis, rank, size) for name, t in model.items()}
    mine = {name: torch.zeros_like(take(model[name], r)) for name, r in regions.items()}
    with Server(Path(address.endpoint.urls[0])) as server, server.running():
        address = replace(address, endpoint=replace(address.endpoint, urls=[server.url]))
        target = mine if size == 1 else Part(mine, regions)
        with Receiver(address, target) as receiver:
            # Making a receiver is not part of a version.
            server.sent, server.answers = 0, 0
            assert receiver.receive() == _VERSIONS
        sent, answers = server.sent, server.answers
    for name, region in regions.items():
        assert torch.equal(mine[name], take(model[name], region)), "other bits have arrived"
    nbytes = sum(tensor.nbytes for tensor in mine.values())
    return f"{nbytes / 1e6:.2f} | {sent / nbytes:.3f} | {answers}"


if __name__ == "__main__":
    main()
