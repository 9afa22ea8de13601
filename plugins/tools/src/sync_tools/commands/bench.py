"""``sync-core bench``: measures the speed of a scheme, compared to the machine's copy speed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from importlib_metadata import entry_points

from sync_core.errors import PluginNotFoundError
from sync_tools.bench import MODELS, Measurement, measure
from sync_tools.commands.scheme_options import parse_scheme_options
from sync_tools.tables import print_line, print_table

_MODEL = "large"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Sends a model to workers, round after round, checks what arrived, and does plain "
        "copies of the same bytes in turn with that. Further --name value pairs are options "
        "of the scheme. With `collector` as the scheme, frames per second of a collector, and "
        "its updates beside those of a bare sender; that takes --scheme, --envs, --modes and "
        "--frames."
    )
    parser.add_argument("scheme", help="the scheme's name, or collector")
    parser.add_argument("--workers", type=int, default=4, help="how many workers (4)")
    parser.add_argument("--model", choices=MODELS, default=_MODEL, help="what is sent (large)")
    parser.add_argument("--zero-copy", action="store_true", help="let the workers keep views")
    parser.add_argument(
        "--consolidate",
        action="store_true",
        help="move the tensors of the trainer and of the workers side by side before",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count, 7 or more (9)")
    parser.add_argument(
        "--changed",
        type=float,
        metavar="SHARE",
        help="send increments, and change this share of the weights before each round, as 0.01",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if arguments.rounds < 7:
        parser.error(f"--rounds must be 7 or more, got {arguments.rounds}")
    if arguments.workers < 1:
        parser.error(f"--workers must be 1 or more, got {arguments.workers}")
    if arguments.changed is not None and not 0 < arguments.changed <= 1:
        parser.error("--changed is a share, more than 0 and at most 1")
    if arguments.scheme == "collector":
        given = arguments.zero_copy, arguments.consolidate, arguments.changed is not None
        if any(given) or arguments.model != _MODEL:
            parser.error(
                "a collector has its own model; leave out --model, --zero-copy, --consolidate and "
                "--changed"
            )
        return _run_collector(arguments, rest)
    measurement = measure(
        arguments.scheme,
        arguments.model,
        workers=arguments.workers,
        zero_copy=arguments.zero_copy,
        consolidated=arguments.consolidate,
        rounds=arguments.rounds,
        changed=arguments.changed,
        options=parse_scheme_options(rest, parser),
    )
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(measurement)) + "\n")
    else:
        _print(measurement)
    return 0


def _run_collector(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run the collector's benchmark, which sync-collector declares."""
    entries = entry_points(group="sync.benchmarks", name="collector")
    if not entries:
        raise PluginNotFoundError(
            "no benchmark 'collector' is installed; type: pip install sync-collector"
        )
    run = next(iter(entries)).load()
    return int(run(rest, arguments.workers, arguments.rounds, arguments.json))


def _as_json(measurement: Measurement) -> dict[str, Any]:
    return asdict(measurement) | {
        "median": measurement.median,
        "gigabytes_per_second": measurement.gigabytes_per_second,
        "share_of_limit": measurement.share_of_limit,
    }


def _print(measurement: Measurement) -> None:
    print_line(
        f"{measurement.plugin}, {measurement.model}: {measurement.nbytes / 1e6:.3g} MB in "
        f"{measurement.tensors} tensors to {measurement.workers} workers on "
        f"{measurement.cores} cores{', zero-copy' * measurement.zero_copy}"
        f"{', consolidated' * measurement.consolidated}"
    )
    rows = []
    moved = measurement.nbytes * measurement.workers
    measured = {"send": measurement.seconds, "limit (pack and copies)": measurement.limit}
    for name, seconds in measured.items():
        if seconds:
            middle = sorted(seconds)[len(seconds) // 2]
            figures = [1e3 * middle, 1e3 * min(seconds), 1e3 * max(seconds), moved / middle / 1e9]
            rows.append((name, *(f"{figure:.2f}" for figure in figures)))
    figures_of = ("median ms", "min ms", "max ms", "GB/s")
    print_table(("", *figures_of), rows, right=figures_of)
    if measurement.changed is not None:
        share = measurement.travelled / measurement.nbytes
        sys.stdout.write(
            f"{measurement.changed:.2%} changed; {measurement.travelled / 1e6:.3g} MB travelled to "
            f"each worker, {share:.2%} of a whole version\n"
        )
    if measurement.share_of_limit is not None:
        sys.stdout.write(f"share of the limit reached: {measurement.share_of_limit:.2f}\n")
