"""Measures the memory that a Ray driver keeps for lent objects, without sync-core.

    python docs/benchmarks/ray_growth.py

In each round a driver puts 66 KB. One actor keeps the newest reference, and three others fetch it
from that actor. In the first run the driver releases each object sixteen rounds later, when no
other process holds it; in the second run at once. Prints the driver's private memory, after the C
library has returned its free memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections import deque
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import ray

_POINTS = 6


class Keeper:
    """Keeps one reference."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    async def give(self, held: list[Any]) -> None:
        """Keep this reference."""
        self._held = held

    async def take(self) -> list[Any]:
        """Return the kept reference."""
        return self._held


class Borrower:
    """Reads the object of a keeper."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    def read(self) -> int:
        """Return the size of the object."""
        return sum(len(ray.get(reference)) for reference in ray.get(self._keeper.take.remote()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6_000)
    rounds = parser.parse_args().rounds
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    keeper: Any = ray.remote(Keeper).remote()
    borrowers: list[Any] = [ray.remote(Borrower).remote(keeper) for _ in range(3)]
    for name, kept in (("last", 16), ("first", 0)):
        held: deque[Any] = deque(maxlen=kept)
        for done in range(1, rounds + 1):
            reference = ray.put(np.zeros(66_000, dtype=np.uint8))
            held.append(reference)
            ray.get(keeper.give.remote([reference]))
            ray.get([borrower.read.remote() for borrower in borrowers])
            if done % max(1, rounds // _POINTS) == 0:
                print(f"the driver lets go {name}: {done} rounds, {_own():.2f} MB", flush=True)


def _own() -> float:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return float(psutil.Process().memory_full_info().uss) / 1e6


if __name__ == "__main__":
    main()
