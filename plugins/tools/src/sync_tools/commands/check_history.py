"""``sync-core check-history``: checks a run's history, which the layer `History` recorded."""

from __future__ import annotations

import argparse
from pathlib import Path

from sync_core.errors import OptionError
from sync_plugin_std.history import RULES, check_history, read_history
from sync_tools.tables import print_line

# The most violations to list.
_LISTED = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Judges the files that Sender(…, layers=[sync_plugin_std.History('run.jsonl')]) has "
        "written, on the trainer's host and on those of workers: "
        + "; ".join(f"{rule} ({promise})" for rule, promise in RULES.items())
        + ". Ends with status 1 if a promise was not kept."
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="such as run.jsonl")
    parser.add_argument(
        "--deadline", type=float, help="the timeout of the sender, in seconds; not judged without"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if rest:
        parser.error(f"check-history has no {' '.join(rest)!r}")
    if arguments.deadline is not None and not arguments.deadline > 0:
        parser.error(f"--deadline must be more than 0 seconds, got {arguments.deadline}")
    for path in arguments.paths:
        if not read_history([path]):
            raise OptionError(
                f"{path} has no events, so nothing can be judged; was anything sent, or committed, "
                "with this History?"
            )
    events = read_history(arguments.paths)
    violations = check_history(events, deadline=arguments.deadline)
    counts = {kind: sum(e["event"] == kind for e in events) for kind in ("send", "commit")}
    reports = sum(event["event"] == "report" for event in events)
    lines = [str(violation) for violation in violations[:_LISTED]]
    if len(violations) > _LISTED:
        lines.append(f"… and {len(violations) - _LISTED} more")
    lines.append(
        f"{len(events)} events, {counts['send']} sends, {counts['commit']} commits, "
        f"{reports} reports: {len(violations) or 'no'} violations"
    )
    for line in lines:
        print_line(line)
    return 1 if violations else 0
