"""Compares our schemes with TorchRL's, alternately in one run, with the same models and workers.

    python docs/benchmarks/against_torchrl.py

Prints a Markdown table of medians in milliseconds. Each figure is the median over all rounds; a
ratio is TorchRL's median divided by ours.
"""

from __future__ import annotations

import argparse
from statistics import median

import torchrl_send

import sync_tools.bench as ours

_ROWS = [
    ("shm", False, "shared"),
    ("shm", True, "shared"),
    ("mp", False, "mp"),
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=ours.MODELS, default=list(ours.MODELS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    print("| model | scheme | ours | limit | share of limit | TorchRL | ratio |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for model in arguments.models:
        _compare(model, arguments.workers, arguments.rounds, arguments.turns)


def _compare(model: str, workers: int, rounds: int, turns: int) -> None:
    theirs: dict[str, list[float]] = {"shared": [], "mp": []}
    mine: dict[tuple[str, bool], list[float]] = {(name, zero): [] for name, zero, _ in _ROWS}
    limit: list[float] = []
    for _ in range(turns):
        for scheme in theirs:
            theirs[scheme] += torchrl_send.measure(scheme, model, workers=workers, rounds=rounds)
        for scheme, zero_copy in mine:
            measured = ours.measure(
                scheme, model, workers=workers, zero_copy=zero_copy, rounds=rounds
            )
            mine[scheme, zero_copy] += measured.seconds
            limit += measured.limit
    for scheme, zero_copy, other in _ROWS:
        own, least, their = (
            median(seconds) for seconds in (mine[scheme, zero_copy], limit, theirs[other])
        )
        print(
            f"| {model} | {scheme}{', zero-copy' * zero_copy} | {1e3 * own:.2f} "
            f"| {1e3 * least:.2f} | {least / own:.2f} | {1e3 * their:.2f} ({other}) "
            f"| {their / own:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
