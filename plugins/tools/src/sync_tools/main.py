"""The command line of ``sync-core``."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from io import UnsupportedOperation

from importlib_metadata import EntryPoint

from sync_core import __version__, registry
from sync_core.errors import PluginImportError, SyncError
from sync_core.printable import printable
from sync_tools.command import Command

__all__ = ["GROUP", "main", "make_parser"]

#: The entry point group of commands.
GROUP = registry.COMMANDS


def make_parser(commands: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        commands: the commands whose arguments to parse; other commands are known only by name. None
            means all.
    """
    parser = argparse.ArgumentParser(
        prog="sync-core", description="Weight synchronisation: what is installed, and how it does."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    entries = list(registry.installed(GROUP))
    is_known = commands is not None and any(entry.name in commands for entry in entries)
    for entry in entries:
        if is_known and entry.name not in (commands or ()):
            # A placeholder; its help line is not printed.
            subparsers.add_parser(entry.name, allow_abbrev=False)
            continue
        command = _load(entry)
        subparser = subparsers.add_parser(
            entry.name, help=printable(command.help), allow_abbrev=False
        )
        if commands is None or entry.name in commands:
            command.add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sync-core`` and return its exit status.

    If the reader of its output exits, as in ``sync-core list | head -3``, the command ends with
    status 1 and without a message.

    Args:
        arguments: the command line after the program's name; None for this process's.
    """
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            # Flushed here, since the interpreter would report the error at exit.
            sys.stdout.flush()
    except BrokenPipeError:
        if not _drop_output():
            raise
    return 1


def _run(given: Sequence[str]) -> int:
    try:
        installed = {entry.name for entry in registry.installed(GROUP)}
        if given and not given[0].startswith("-") and given[0] not in installed:
            registry.entry_point(GROUP, given[0])  # raises, and says what to type
        parser = make_parser(given[:1])
        parsed, rest = parser.parse_known_args(given)
        return int(parsed.run(parsed, rest, parser))
    except BrokenPipeError:
        raise
    except (SyncError, OSError) as error:
        sys.stderr.write(f"sync-core: {printable(str(error))}\n")
    return 1


def _drop_output() -> bool:
    """Redirect pipes without a reader to nowhere; return False if all pipes have one."""
    dropped = False
    for stream in (sys.stdout, sys.stderr):
        try:
            number = stream.fileno()
        except (AttributeError, UnsupportedOperation, ValueError):
            continue
        asked = select.poll()
        asked.register(number, 0)
        if any(found & select.POLLERR for _, found in asked.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
            dropped = True
    return dropped


def _load(entry: EntryPoint) -> Command:
    """Return the command that an entry point refers to; a broken command fails when it is used."""
    try:
        command = entry.load()
        if not isinstance(command, Command):
            raise TypeError(f"{entry.value} must be a sync_tools.Command, got {command!r}")
    except Exception as error:
        distribution, version = registry.owner_of(entry)
        return _Broken(
            f"does not import ({distribution} {version})",
            f"the command {entry.name!r} ({distribution} {version}) does not import: {error!r}; "
            f"{registry.how_to_update(distribution)}",
        )
    return command


class _Broken(Command):
    """A command that cannot be imported; ``module`` is the error message."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        del parser
        raise PluginImportError(self.module)
