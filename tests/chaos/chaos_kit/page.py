"""The page about a run of ``make chaos``: where and how it was made, and its tables."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from chaos_kit.outcome import Outcome, table

# Of the command: what says where something is kept, and not what is done.
_WHERE = ("--journal", "--page")


def page_of(outcomes: Sequence[Outcome], reads: Mapping[str, Mapping[str, int]]) -> str:
    """The page, as Markdown."""
    return "\n".join(_lines(outcomes, reads))


def _lines(outcomes: Sequence[Outcome], reads: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    wrong = sum(not outcome.ok for outcome in outcomes)
    yield "# The fault matrix\n"
    yield (
        "Written by `make chaos`; see [how faults are injected](authors/faults.md). "
        "[Reliability](reliability.md) says what else was run.\n"
    )
    yield f"{_made(outcomes)}\n"
    yield (
        f"{len(outcomes)} runs, {wrong} of them not as documented. In each run, three workers get "
        "versions before, during and after a fault, and are looked at: every send ends within its "
        "deadline, and reports the outcome of each worker; a worker that is not hurt has the new "
        "version whole; one that is hurt has the old or the new one whole, or is gone; the next "
        "send works; a worker in the place of one that was killed comes up to date; nothing is "
        "left open.\n"
    )
    yield table(outcomes)
    if reads:
        yield "Readers in tight loops, while the trainer publishes as fast as it can:\n"
        yield _reads_table(reads)


def _made(outcomes: Sequence[Outcome]) -> str:
    days = sorted({outcome.day for outcome in outcomes})
    when = f" on {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"Made{when} by `{_command(sys.argv[1:])}` on {_processor()}, {os.cpu_count()} cores, "
        f"{gib:.0f} GiB, {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}. The command is that of the last "
        "run, which continued with what those before it had done."
    )


def _command(arguments: Sequence[str]) -> str:
    """Return what to type to have it made again."""
    kept = [
        argument
        for i, argument in enumerate(arguments)
        if argument != "--fresh" and argument not in _WHERE and arguments[i - 1] not in _WHERE
    ]
    return f"make chaos ARGS='{' '.join(kept)}'" if kept else "make chaos"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def _reads_table(reads: Mapping[str, Mapping[str, int]]) -> str:
    heads = ("reads", "torn", "backwards", "versions", "killed")
    lines = [
        "| scheme | way | " + " | ".join(heads) + " |",
        "| --- | --- |" + " ---: |" * len(heads),
    ]
    lines += [
        f"| {key} | " + " | ".join(f"{row[h]:,}" for h in heads) + " |"
        for key, row in reads.items()
    ]
    return "\n".join(lines) + "\n"
