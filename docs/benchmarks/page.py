"""Writes ``docs/benchmarks.md`` from ``docs/benchmarks/results.jsonl``, and adds results to it.

A line of the file is one table of one run: ``table`` (one of `tables.toml`), ``date``, ``machine``,
``columns`` and ``rows``. The page shows the newest run of each table on each machine.

    python docs/benchmarks/page.py
    python docs/benchmarks/against_torchrl.py | python docs/benchmarks/page.py --record local
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.jsonl"
PAGE = FOLDER.with_suffix(".md")
PLOT = FOLDER / "ratios.svg"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page.

    Args:
        title: its heading.
        about: what the rows and columns are.
        command: what measures it again.
    """

    title: str
    about: str
    command: str


def tables() -> tuple[str, dict[str, Table]]:
    """Return the page's introduction, and its tables by name."""
    found = tomllib.loads((FOLDER / "tables.toml").read_text(encoding="utf-8"))
    introduction: str = found.pop("introduction")
    return introduction, {name: Table(**table) for name, table in found.items()}


def main() -> None:
    """Write the page, after a table from standard input was added where one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", choices=tables()[1], help="add the table on standard input")
    recorded = parser.parse_args().record
    if recorded is not None:
        add(recorded, sys.stdin.read())
    found = results()
    PAGE.write_text(page(found), encoding="utf-8")
    plot(found)


def results() -> list[dict[str, Any]]:
    """Return the newest run of each table on each machine, in the order of the page."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        key = run["table"], run["machine"]
        if key not in newest or newest[key]["date"] <= run["date"]:
            newest[key] = run
    order = list(tables()[1])
    return sorted(newest.values(), key=lambda run: (order.index(run["table"]), run["machine"]))


def page(runs: list[dict[str, Any]]) -> str:
    """Return the page's text."""
    introduction, described = tables()
    parts = [introduction]
    for name, table in described.items():
        parts += [f"## {table.title}\n", table.about]
        for run in (run for run in runs if run["table"] == name):
            parts += [f"{run['date']}, {run['machine']}:\n", f"{_markdown(run)}\n"]
        parts += [f"```bash\n{table.command}\n```\n"]
    return "\n".join(parts)


def add(name: str, text: str) -> None:
    """Append the first markdown table of a text to the results."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    run = {
        "table": name,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "columns": cells[0],
        "rows": [row for row in cells[2:] if len(row) == len(cells[0])],
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run, ensure_ascii=False) + "\n")


def plot(runs: list[dict[str, Any]]) -> None:
    """Draw how many times faster than TorchRL each local scheme is, from the newest run."""
    from matplotlib import pyplot as plt

    run = max((run for run in runs if run["table"] == "local"), key=lambda run: run["date"])
    names, ratios, model = [], [], ""
    for row in run["rows"]:
        model = row[0].partition(":")[0] or model
        names.append(f"{model}, {row[1]}")
        ratios.append(float(row[-1]))
    figure, axes = plt.subplots(figsize=(7, 0.32 * len(names) + 0.8), layout="constrained")
    axes.barh(names[::-1], ratios[::-1], color="#4477aa")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("TorchRL's time divided by ours (log scale; 1 is equal)")
    # Neither ids nor the date change from one drawing to the next.
    with plt.rc_context({"svg.hashsalt": "sync-core"}):
        figure.savefig(PLOT, metadata={"Date": None})


def _markdown(run: dict[str, Any]) -> str:
    lines = ["| " + " | ".join(run["columns"]) + " |"]
    lines.append(
        "|" + "|".join("---" if i == 0 else "--:" for i in range(len(run["columns"]))) + "|"
    )
    lines += ["| " + " | ".join(row) + " |" for row in run["rows"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
