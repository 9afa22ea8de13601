"""``sync-core watch``: shows the workers of a running sender in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from sync_core.errors import SyncError
from sync_tools.tables import format_table, paint, terminal_width

# The longest wait for an answer, in seconds: a slower sender is stopped, or busy with other
# readers.
_DEADLINE = 5.0
# The longest sleep in seconds; the system refuses a longer one.
_LONGEST_INTERVAL = 1e9
_COLOURS = {
    "current": "green",
    "behind": "yellow",
    "connecting": "yellow",
    "restarting": "yellow",
    "suspect": "red",
    "quarantined": "red",
    "bad": "red",
    "lost": "red",
}
# The longest answer in bytes: 60 KB from each of some thousand workers.
_LONGEST = 1 << 28
# The columns with the milliseconds of a worker's last update, by title.
_PHASES = {
    "deliver": "deliver_seconds",
    "stage": "stage_seconds",
    "commit": "commit_seconds",
    "pause": "pause_seconds",
    "answer": "acknowledge_seconds",
}


class StatusError(SyncError):
    """No status can be read from an address."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Shows each worker of a running sender: its state, its version, how many versions it is "
        "behind, the milliseconds of each phase and the bytes of its last update, and its last "
        "error. The trainer makes a StatusServer of the sender, and prints the address with "
        "print(StatusServer(sender).address)."
    )
    parser.add_argument("address", help="the address of a StatusServer")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between looks (1)")
    parser.add_argument("--once", action="store_true", help="print one table, and end")
    parser.add_argument("--json", action="store_true", help="print JSON once, and end")
    parser.set_defaults(run=_run)


def fetch(address: str) -> dict[str, Any]:
    """Return the status of the sender at an address, with the fields of `SenderView`.

    Raises:
        StatusError: the sender does not answer, or refuses the token.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is not a number, or brackets without an IPv6 address
        host = port = None
    if not host or not port or parts.scheme != "http":
        raise StatusError(
            f"{address!r} is not a status address; it looks like http://127.0.0.1:40000/TOKEN, and "
            "print(StatusServer(sender).address) prints it; type: from sync_tools import "
            "StatusServer"
        )
    connection = HTTPConnection(host, port, timeout=_DEADLINE)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        content = json.loads(response.read(_LONGEST))
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise StatusError(f"no sender answers at {parts.netloc}: {error}") from error
    finally:
        connection.close()
    try:
        if response.status != 200:
            raise StatusError(f"the sender at {parts.netloc} refuses: {content['error']}")
        render(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StatusError(
            f"what answers at {parts.netloc} is not a StatusServer; give the address that "
            "print(StatusServer(sender).address) prints"
        ) from error
    return dict(content)


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if rest:
        parser.error(f"watch has no {' '.join(rest)!r}")
    if not 0 < arguments.interval < _LONGEST_INTERVAL:
        parser.error(f"--interval must be more than 0 seconds, got {arguments.interval}")
    status = fetch(arguments.address)
    if arguments.json:
        sys.stdout.write(json.dumps(status, indent=2) + "\n")
    elif arguments.once:
        sys.stdout.write(f"{render(status)}\n")
    else:
        _watch(arguments.address, status, arguments.interval)
    return 0


def _watch(address: str, status: Mapping[str, Any], interval: float) -> None:
    # A terminal shows one table; a file gets one after the other.
    top = "\x1b[H\x1b[J" if sys.stdout.isatty() else ""
    try:
        while True:
            sys.stdout.write(f"{top}{render(status)}\n")
            sys.stdout.flush()
            time.sleep(interval)
            status = fetch(address)
    except KeyboardInterrupt:
        return
    except StatusError as error:
        sys.stdout.write(f"{error}; it was closed, or its process has ended\n")


def render(status: Mapping[str, Any]) -> str:
    """Return a line about the sender, a table of its workers, and their errors.

    Args:
        status: the fields of `SenderView`.
    """
    workers = status["workers"]
    figures = ("since", "version", "lag", *_PHASES, "MB")
    table = format_table(
        ("worker", "state", *figures),
        [_cells(worker) for worker in workers],
        right={"worker", *figures},
        colours=[_COLOURS.get(worker["state"]) for worker in workers],
        width=terminal_width(),
    )
    errors = [paint(worker["error"], "red") for worker in workers if worker["error"]]
    caption = "deliver to answer: milliseconds of the worker's last update"
    return "\n".join([paint(_headline(status), None), "", table, "", caption, *errors])


def _headline(status: Mapping[str, Any]) -> str:
    line = (
        f"{status['model_id']} by {status['scheme']}, process {status['process']}: version "
        f"{status['version']}, {status['sends']} sends, {status['failed_sends']} failed, "
        f"{status['nbytes'] / 1e6:,.1f} MB"
    )
    last = status["last"]
    if last is None:
        return f"{line}; nothing was sent yet"
    phases = ", ".join(
        f"{phase} {1e3 * last[f'{phase}_seconds']:.1f}" for phase in ("prepare", "pack", "publish")
    )
    return (
        f"{line}; the last took {1e3 * last['seconds']:.1f} ms ({phases}), "
        f"{last['ago_seconds']:.0f} s ago"
    )


def _cells(worker: Mapping[str, Any]) -> list[str]:
    # For a failed update, only its duration is known.
    last = None if worker["last"] is None or worker["last"]["error"] else worker["last"]
    return [
        str(worker["worker_id"]),
        worker["state"],
        f"{worker['state_seconds']:.0f} s",
        str(worker["version"]),
        str(worker["lag"]),
        *(_milliseconds(last, field) for field in _PHASES.values()),
        "" if last is None else f"{last['nbytes'] / 1e6:,.1f}",
    ]


def _milliseconds(last: Mapping[str, Any] | None, field: str) -> str:
    seconds = None if last is None else last[field]
    return "" if seconds is None else f"{1e3 * seconds:.1f}"
