"""``sync-core bench collector``: frames per second, and update times compared to other senders."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median

from sync_collector.bench.measure import MODES, CollectorMeasurement, measure_collector
from sync_collector.bench.training import ENVS
from sync_tools.tables import print_table


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the arguments that only this command has."""
    parser = argparse.ArgumentParser(prog="sync-core bench collector", description=__doc__)
    parser.add_argument("--scheme", default="shm", help="how weights travel (shm)")
    parser.add_argument("--envs", nargs="+", choices=ENVS, default=ENVS, help="environments (both)")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="how batches are made (all)"
    )
    parser.add_argument("--frames", type=int, default=1000, help="frames per batch (1000)")
    parser.add_argument("--threads", type=int, default=1, help="torch's, of the trainer (1)")
    return parser


def run(rest: Sequence[str], workers: int, rounds: int, as_json: bool) -> int:
    """Run the measurements and print the results.

    Args:
        rest: the arguments that only this command has.
        workers: the number of workers in modes with several.
        rounds: the number of rounds that are measured.
        as_json: print JSON.
    """
    parser = make_parser()
    own = parser.parse_args(rest)
    for name, given in (("--frames", own.frames), ("--threads", own.threads)):
        if given < 1:
            parser.error(f"{name} is 1 or more")
    measured = (
        measure_collector(
            env,
            mode,
            scheme=own.scheme,
            workers=workers,
            frames_per_batch=own.frames,
            rounds=rounds,
            threads=own.threads,
        )
        for env in own.envs
        for mode in own.modes
    )
    if as_json:
        sys.stdout.write(json.dumps([asdict(measurement) for measurement in measured]) + "\n")
    else:
        _print(measured)
    return 0


def _print(measured: Iterator[CollectorMeasurement]) -> None:
    figures = ("frames/s", "sync", "by hand", "bare", "refresh")
    rows = [
        (
            measurement.env,
            measurement.mode,
            f"{median(measurement.frames_per_second):.0f}",
            _milliseconds(measurement.sync_seconds),
            _milliseconds(measurement.by_hand_seconds),
            _milliseconds(measurement.bare_seconds),
            _milliseconds(measurement.refresh_seconds),
        )
        for measurement in measured
    ]
    print_table(("", "mode", *figures), rows, right=figures)
    sys.stdout.write(
        "sync, by hand and bare: milliseconds until all workers have the weights; refresh: until "
        "they are sent\n"
    )


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.2f}"
