"""The command ``sync-core``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sync_core.cli import bench, doctor, listing, new_plugin
from sync_core.errors import SyncError

_COMMANDS = (listing, doctor, bench, new_plugin)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with every command."""
    parser = argparse.ArgumentParser(prog="sync-core", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sync-core`` and return its exit status.

    Args:
        arguments: the command line after the program's name; None for this process's.
    """
    parser = make_parser()
    parsed, rest = parser.parse_known_args(arguments)
    try:
        return int(parsed.run(parsed, rest, parser))
    except SyncError as error:
        sys.stderr.write(f"sync-core: {error}\n")
        return 1
