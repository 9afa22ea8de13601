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
# The README's picture, and its learning curve: the frames and the mean returns of the last 100
# episodes, as printed by the tutorial's program.
FIRST_SCREEN = FOLDER / "first-screen.svg"
CURVE = FOLDER / "cartpole.json"
TUTORIAL = FOLDER.parent / "tutorials" / "cartpole.svg"
# Keeps ids and the date out of the drawing, and text as text, so that drawings are reproducible.
STYLE = {"svg.hashsalt": "sync-core", "svg.fonttype": "none"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page.

    Args:
        title: its heading.
        about: the description of the rows and columns.
        command: the command that measures it again.
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
    """Write the page; first add a table from standard input, if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", choices=tables()[1], help="add the table on standard input")
    recorded = parser.parse_args().record
    if recorded is not None:
        add(recorded, sys.stdin.read())
    found = results()
    PAGE.write_text(page(found), encoding="utf-8")
    plot(found)
    plot_first_screen(found)


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
    """Draw how many times faster than TorchRL each local scheme is, in the newest run."""
    from matplotlib import pyplot as plt

    run = max((run for run in runs if run["table"] == "local"), key=lambda run: run["date"])
    names, ratios, model = [], [], ""
    for row in run["rows"]:
        model = row[0].partition(":")[0] or model
        names.append(f"{model}, {row[1]}")
        ratios.append(float(row[-1]))
    figure, axes = plt.subplots(figsize=(7, 0.32 * len(names) + 0.8), layout="constrained")
    # A bar begins at 1, where both are equal; it extends to the left if ours is slower.
    widths = [ratio - 1 for ratio in reversed(ratios)]
    colors = ["#4477aa" if width >= 0 else "#cc6677" for width in widths]
    axes.barh(names[::-1], widths, left=1.0, color=colors)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("TorchRL's time divided by ours (log scale; left of 1, ours is slower)")
    with plt.rc_context(STYLE):
        figure.savefig(PLOT, metadata={"Date": None})


def plot_first_screen(runs: list[dict[str, Any]]) -> None:
    """Draw the README's picture: a learning curve, and update times compared to TorchRL's."""
    from matplotlib import pyplot as plt

    curve = json.loads(CURVE.read_text(encoding="utf-8"))
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 2.7), layout="constrained")
        _draw_curve(left, curve)
        _draw_times(right, max((r for r in runs if r["table"] == "local"), key=lambda r: r["date"]))
        figure.savefig(FIRST_SCREEN, metadata={"Date": None})
        alone, axes = plt.subplots(figsize=(6, 3), layout="constrained")
        _draw_curve(axes, curve)
        alone.savefig(TUTORIAL, metadata={"Date": None})
    plt.close("all")


def _draw_curve(axes: Any, curve: dict[str, Any]) -> None:
    frames = [each / 1e3 for each in curve["frames"]]
    axes.plot(frames, curve["returns"], color="#4477aa")
    axes.set(title="CartPole, PPO, 2 workers", xlabel="thousand frames")
    axes.set(ylabel="mean return of\nthe last 100 episodes", ylim=(0, 510))


def _draw_times(axes: Any, run: dict[str, Any]) -> None:
    rows = [row for row in run["rows"] if row[1] == "shm"]
    models = [row[0].replace(": ", "\n") for row in rows]
    ways = {
        "sync-core, shm": [float(row[2]) for row in rows],
        "TorchRL, shared": [float(row[5].partition(" ")[0]) for row in rows],
    }
    places = range(len(rows))
    for shift, color, (name, values) in zip(
        (0.2, -0.2), ("#4477aa", "#ccbb44"), ways.items(), strict=True
    ):
        bars = axes.barh([p + shift for p in places], values, 0.4, color=color, label=name)
        axes.bar_label(bars, [f"{value:,.3g}" for value in values], padding=2, fontsize=8)
    axes.set(title="update of 4 workers (ms, log scale)", xscale="log", xlim=(0.1, 3000))
    axes.set_yticks(list(places), models, fontsize=8)
    axes.legend(fontsize=8, loc="lower right")


def _markdown(run: dict[str, Any]) -> str:
    lines = ["| " + " | ".join(run["columns"]) + " |"]
    lines.append(
        "|" + "|".join("---" if i == 0 else "--:" for i in range(len(run["columns"]))) + "|"
    )
    lines += ["| " + " | ".join(row) + " |" for row in run["rows"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
