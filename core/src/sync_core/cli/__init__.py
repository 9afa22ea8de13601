"""The command ``sync-core``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sync_core.cli import bench, doctor, listing, new_plugin
from sync_core.errors import SyncError

_COMMANDS = (listing, doctor, bench, new_plugin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sync-core`` and return its exit status.

    Args:
        arguments: the command line after the program's name; None for this process's.
    """
    parser = argparse.ArgumentParser(prog="sync-core", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(subparsers)
    parsed, rest = parser.parse_known_args(arguments)
    try:
        return int(parsed.run(parsed, rest, parser))
    except SyncError as error:
        sys.stderr.write(f"sync-core: {error}\n")
        return 1
