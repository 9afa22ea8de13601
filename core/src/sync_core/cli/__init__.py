"""The command ``sync-core``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from sync_core import __version__
from sync_core.errors import SyncError

#: The module of each command, imported when the command is used, and its line of help.
COMMANDS = {
    "list": ("listing", "schemes, layers and worker groups installed here"),
    "doctor": ("doctor", "does each installed scheme really move weights on this machine?"),
    "bench": ("bench", "seconds, GB/s, and the share of this machine's copy limit"),
    "plan": ("plan", "seconds and memory of an update of your model, by each scheme"),
    "watch": ("watch", "the workers of a running sender: state, version, lag, last error"),
    "report": ("report", "an HTML page of the sends that the layer Record has written"),
    "new-plugin": (
        "new_plugin",
        "write a distribution that passes the conformance suite as generated",
    ),
}


def make_parser(commands: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        commands: those whose arguments it has; of others it knows the names only.
    """
    parser = argparse.ArgumentParser(prog="sync-core", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, (module, line) in COMMANDS.items():
        subparser = subparsers.add_parser(command, help=line, allow_abbrev=False)
        if command in commands:
            import_module(f"sync_core.cli.{module}").add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sync-core`` and return its exit status.

    Args:
        arguments: the command line after the program's name; None for this process's.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        parser = make_parser(given[:1])
        parsed, rest = parser.parse_known_args(given)
        return int(parsed.run(parsed, rest, parser))
    except SyncError as error:
        sys.stderr.write(f"sync-core: {error}\n")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        sys.stderr.write("sync-core: rich is not installed; type: pip install 'sync-core[cli]'\n")
    return 1
