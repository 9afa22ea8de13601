"""Compares our collector with TorchRL's, alternately in one run, with the same environments.

    python docs/benchmarks/collector_against_torchrl.py

Prints a Markdown table of median frames per second, and of milliseconds that updates take.
TorchRL's ``single``, ``sync`` and ``first-ready`` are `Collector`, `MultiSyncCollector` and
`MultiAsyncCollector`; with ``--scheme ray`` the latter two are
`RayCollector`.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torchrl_collect

from sync_collector.bench.measure import MODES, measure_collector
from sync_collector.bench.training import ENVS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", choices=ENVS, default=ENVS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--scheme", choices=("shm", "ray"), default="shm")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    options: dict[str, Any] = {
        "scheme": arguments.scheme,
        "workers": arguments.workers,
        "frames_per_batch": arguments.frames,
        "rounds": arguments.rounds,
    }
    print("| environment | mode | ours | TorchRL | ratio | sync | by hand | bare | refresh |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for env in arguments.envs:
        for mode in arguments.modes:
            _compare(env, mode, arguments.turns, arguments.threads, options)


def _compare(env: str, mode: str, turns: int, threads: int, options: dict[str, Any]) -> None:
    ours: list[float] = []
    theirs: list[float] = []
    sync: list[float] = []
    by_hand: list[float] = []
    bare: list[float] = []
    refresh: list[float] = []
    for _ in range(turns):
        theirs += torchrl_collect.measure(env, mode, **options)
        measured = measure_collector(env, mode, threads=threads, **options)
        ours += measured.frames_per_second
        sync += measured.sync_seconds
        by_hand += measured.by_hand_seconds
        bare += measured.bare_seconds
        refresh += measured.refresh_seconds
    print(
        f"| {env} | {mode} | {median(ours):.0f} | {median(theirs):.0f} "
        f"| {median(ours) / median(theirs):.1f} | {1e3 * median(sync):.2f} "
        f"| {1e3 * median(by_hand):.2f} | {1e3 * median(bare):.2f} "
        f"| {1e3 * median(refresh):.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
