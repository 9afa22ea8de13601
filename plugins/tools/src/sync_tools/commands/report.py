"""``sync-core report``: makes an HTML page of the sends that `Record` has written to a file."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape as escape_html
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from sync_core.errors import OptionError
from sync_core.printable import printable

Reports = Sequence[Mapping[str, Any]]
# The most failures to list.
_LISTED = 200


@dataclass
class WorkerHistory:
    """The history of one worker of one model.

    Args:
        row: its row in the timeline.
        held: the newest version that it has acknowledged; 0 for none.
        since: the start of the strip that shows its current lag, in seconds.
        lag: how many versions it has been behind since ``since``.
        longest_lag: the most versions that it was behind after a send.
        updates: the number of sends after which it had the new version.
        skipped: the number of sends that skipped it.
        failures: the number of sends that failed for it.
        nbytes: bytes delivered to it.
        pauses: how long each update paused the worker, in seconds.
    """

    row: int
    held: int = 0
    since: float = 0.0
    lag: int = 0
    longest_lag: int = 0
    updates: int = 0
    skipped: int = 0
    failures: int = 0
    nbytes: int = 0
    pauses: list[float] = field(default_factory=list)


@dataclass
class Timeline:
    """The rows, phase bars and lag strips of the drawing, in seconds from the first report."""

    rows: list[str] = field(default_factory=list)
    bars: list[tuple[int, str, float, float, int]] = field(default_factory=list)
    lags: list[tuple[int, float, float, int]] = field(default_factory=list)
    end: float = 1e-3
    workers: dict[tuple[str, int], WorkerHistory] = field(default_factory=dict)
    _senders: dict[str, int] = field(default_factory=dict)
    _newest: dict[str, int] = field(default_factory=dict)

    def add(self, report: Mapping[str, Any], began: float, ended: float) -> None:
        """Add a report.

        Args:
            report: the fields of a `SendReport`.
            began: its start, in seconds.
            ended: its end, in seconds.
        """
        model, version = report["model_id"], report["version"]
        self.end = max(self.end, ended)
        if version == 1 < self._newest.get(model, 1):
            # The trainer was restarted: its workers have none of its versions yet.
            for (of, _), worker in self.workers.items():
                worker.held = 0 if of == model else worker.held
        self._newest[model] = version
        sender = self._senders.setdefault(model, len(self.rows))
        if sender == len(self.rows):
            self.rows.append(printable(f"{model}: sender"))
        prepared = began + report["prepare_seconds"]
        published = prepared + report["publish_seconds"]
        self._bar(sender, "prepare", began, prepared, version)
        self._bar(sender, "publish", prepared, published, version)
        self._bar(sender, "pack", prepared, prepared + report["pack_seconds"], version)
        for result in report["workers"]:
            key = model, result["worker_id"]
            if key not in self.workers:
                self.workers[key] = WorkerHistory(len(self.rows), since=began)
                self.rows.append(f"worker {result['worker_id']}")
            worker = self.workers[key]
            if result["error"] is None:
                self._phases(worker.row, result, published, version)
            else:
                self._bar(worker.row, "failed", began, began + result["seconds"], version)
            self._count(worker, result)
        for (of, _), worker in self.workers.items():
            if of == model:
                self._lag(worker, version, ended)

    def finish(self) -> None:
        """End every strip."""
        for worker in self.workers.values():
            self.lags.append((worker.row, worker.since, self.end, worker.lag))

    def _phases(self, row: int, result: Mapping[str, Any], start: float, version: int) -> None:
        for phase in ("deliver", "stage", "pause", "acknowledge"):
            end = start + (result[f"{phase}_seconds"] or 0.0)
            self._bar(row, phase, start, end, version)
            if phase == "pause":
                self._bar(row, "commit", start, start + result["commit_seconds"], version)
            start = end

    def _count(self, worker: WorkerHistory, result: Mapping[str, Any]) -> None:
        worker.nbytes += result["nbytes"]
        worker.skipped += result["skipped"]
        worker.failures += result["error"] is not None
        if result["version"] is not None:
            worker.updates += 1
            worker.held = max(worker.held, result["version"])
            worker.pauses.append(result["pause_seconds"])

    def _lag(self, worker: WorkerHistory, newest: int, now: float) -> None:
        lag = max(0, newest - worker.held)
        worker.longest_lag = max(worker.longest_lag, lag)
        if lag != worker.lag:
            self.lags.append((worker.row, worker.since, now, worker.lag))
            worker.since, worker.lag = now, lag

    def _bar(self, row: int, kind: str, start: float, end: float, version: int) -> None:
        if end > start:
            self.bars.append((row, kind, start, end, version))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Makes one HTML page, which needs no other file and no network, of a file that the layer "
        "Record has written: Sender(…, layers=[sync_plugin_std.Record('run.jsonl')]). It shows "
        "the phases of each send for each worker, how many versions workers were behind, bytes, "
        "and failures."
    )
    parser.add_argument("path", type=Path, help="the file of reports, such as run.jsonl")
    parser.add_argument("--output", type=Path, help="the page (the path, with .html)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if rest:
        parser.error(f"report has no {' '.join(rest)!r}")
    page_text = page_of(arguments.path)
    output = arguments.output or arguments.path.with_suffix(".html")
    output.write_text(page_text, encoding="utf-8")
    sys.stdout.write(f"wrote {output}\n")
    return 0


def page_of(path: Path) -> str:
    """Return the page of the reports in a file.

    Raises:
        OptionError: see `read`; or a report has invalid values for a `SendReport`.
    """
    reports = read(path)
    try:
        return page(reports, path.name)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as error:
        raise OptionError(
            f"{path} has values that no report of sync_plugin_std.Record has: {error!r:.200}"
        ) from error


def read(path: Path) -> Reports:
    """Return the reports in a file, sorted by the time of their end.

    An unfinished last line, which a killed process may leave, is ignored.

    Raises:
        OptionError: the file does not exist, has no reports, or has an invalid line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {path}: {error}") from error
    reports = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            report = json.loads(line)
            if "event" in report:
                continue  # of the layer History, a subclass of Record
            float(report["time"]), report["workers"], report["publish_seconds"]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise OptionError(
                f"{path}, line {number}, is not a report of sync_plugin_std.Record: {error!r}"
            ) from error
        reports.append(report)
    if not reports:
        raise OptionError(f"{path} has no reports; was anything sent with this Record?")
    return sorted(reports, key=lambda report: float(report["time"]))


def escape(text: str) -> str:
    """Return HTML that shows a text literally."""
    return escape_html(printable(text))


def timeline(reports: Reports) -> Timeline:
    """Return the drawing of these reports."""
    zero = min(report["time"] - report["seconds"] for report in reports)
    drawn = Timeline()
    for report in reports:
        # Relative to the first: a float since 1970 would be exact to less than a microsecond only.
        began = max(0.0, report["time"] - report["seconds"] - zero)
        drawn.add(report, began, began + report["seconds"])
    drawn.finish()
    return drawn


def page(reports: Reports, title: str) -> str:
    """Return the HTML page of these reports."""
    drawn = timeline(reports)
    data = {"rows": drawn.rows, "bars": drawn.bars, "lags": drawn.lags, "end": drawn.end}
    parts = {
        "TITLE": escape(title),
        "ABOUT": escape(_about(reports)),
        "FIGURES": "".join(
            f"<div><b>{value}</b>{name}</div>" for name, value in _figures(reports, drawn)
        ),
        "WORKERS": _table(_WORKER_COLUMNS, _worker_rows(drawn)),
        "FAILURES": _failures(reports),
        # A name may contain "</script>".
        "DATA": json.dumps(data).replace("<", "\\u003c"),
    }
    template = files("sync_tools.commands").joinpath("report.html").read_text(encoding="utf-8")
    # In one pass, since inserted text may look like a placeholder.
    return re.sub(r"@([A-Z]+)@", lambda mark: parts[mark[1]], template)


def _about(reports: Reports) -> str:
    began = datetime.fromtimestamp(reports[0]["time"] - reports[0]["seconds"], UTC)
    schemes = sorted({report["scheme"] for report in reports})
    return f"{began:%Y-%m-%d %H:%M:%S} UTC, {', '.join(schemes)}"


def _figures(reports: Reports, drawn: Timeline) -> Iterator[tuple[str, str]]:
    seconds = sorted(report["seconds"] for report in reports)
    failed = sum(any(result["error"] for result in report["workers"]) for report in reports)
    yield "sends", f"{len(reports):,}"
    yield "sends that failed", f"{failed:,}"
    yield "workers", f"{len(drawn.workers):,}"
    yield "median send", f"{1e3 * median(seconds):,.1f} ms"
    yield "99 % within", f"{1e3 * seconds[int(0.99 * (len(seconds) - 1))]:,.1f} ms"
    yield (
        "most versions behind",
        f"{max((w.longest_lag for w in drawn.workers.values()), default=0)}",
    )
    yield "delivered", f"{sum(w.nbytes for w in drawn.workers.values()) / 1e6:,.1f} MB"


_WORKER_COLUMNS = (
    "worker",
    "updates",
    "held back",
    "failures",
    "has version",
    "most behind",
    "median pause ms",
    "MB",
)


def _worker_rows(drawn: Timeline) -> Iterator[tuple[str, ...]]:
    for (model, worker_id), worker in drawn.workers.items():
        yield (
            escape(f"{model}, {worker_id}"),
            f"{worker.updates:,}",
            f"{worker.skipped:,}",
            f'<span class="bad">{worker.failures:,}</span>' if worker.failures else "0",
            f"{worker.held:,}",
            f"{worker.longest_lag:,}",
            f"{1e3 * median(worker.pauses):.2f}" if worker.pauses else "",
            f"{worker.nbytes / 1e6:,.1f}",
        )


def _failures(reports: Reports) -> str:
    rows = [
        (
            f"{datetime.fromtimestamp(report['time'], UTC):%H:%M:%S}",
            f"{report['version']:,}",
            escape(f"{report['model_id']}, {result['worker_id']}"),
            escape(result["remedy"] or ""),
            escape(result["error"]),
        )
        for report in reports
        for result in report["workers"]
        if result["error"] is not None
    ]
    if not rows:
        return "<p>None.</p>"
    shown = _table(("UTC", "version", "worker", "remedy", "error"), rows[-_LISTED:], text=4)
    return f"<p>The last {_LISTED} of {len(rows):,}.</p>{shown}" if rows[_LISTED:] else shown


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = -1) -> str:
    kinds = ["" if number != text else ' class="text"' for number in range(len(columns))]
    lines = ["<table><tr>", *(f"<th{k}>{c}</th>" for k, c in zip(kinds, columns, strict=True))]
    for row in rows:
        lines += ["</tr><tr>", *(f"<td{k}>{c}</td>" for k, c in zip(kinds, row, strict=True))]
    return "".join([*lines, "</tr></table>"])
