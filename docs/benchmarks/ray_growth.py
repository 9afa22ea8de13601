"""Ray alone: does a driver grow by puts and calls, as a trainer makes them?

    python docs/benchmarks/ray_growth.py

A driver puts 66 KB, round after round. First nobody else gets the reference; then an actor keeps
the newest, and three others fetch it from there. Prints the memory that is the driver's own.
"""

from __future__ import annotations

import argparse
import gc
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
        """Keep this one."""
        self._held = held

    async def take(self) -> list[Any]:
        """The one that is kept."""
        return self._held


class Borrower:
    """Reads what a keeper has."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    def read(self) -> int:
        """Its size."""
        return sum(len(ray.get(reference)) for reference in ray.get(self._keeper.take.remote()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12_000)
    rounds = parser.parse_args().rounds
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    keeper: Any = ray.remote(Keeper).remote()
    borrowers: list[Any] = [ray.remote(Borrower).remote(keeper) for _ in range(3)]
    for borrowed in (False, True):
        for done in range(1, rounds + 1):
            reference = ray.put(np.zeros(66_000, dtype=np.uint8))
            ray.get(keeper.give.remote([reference] if borrowed else []))
            ray.get([borrower.read.remote() for borrower in borrowers])
            if done % max(1, rounds // _POINTS) == 0:
                gc.collect()
                own = psutil.Process().memory_full_info().uss / 1e6
                print(f"{'borrowed' if borrowed else 'own'}: {done} rounds, {own:.1f} MB")


if __name__ == "__main__":
    main()
