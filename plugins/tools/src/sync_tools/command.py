"""The interface of a command of ``sync-core``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``sync-core``, which a distribution declares as an entry point.

    The entry point ``sync.commands`` of the command's name refers to an instance. The module is
    imported when the command is used, so that ``sync-core --help`` imports nothing slow. Its
    ``add_arguments(parser)`` adds the command's arguments to an `argparse.ArgumentParser`, and sets
    the default ``run``: a function of the parsed arguments, a list of the arguments that the parser
    does not know, and the parser, which returns the exit status.

    Args:
        help: the command's line in ``sync-core --help``.
        module: the name of the module that has the command.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> Command("what is installed", "sync_tools.commands.listing").add_arguments(parser)
        >>> parser.parse_args(["--json"]).json
        True
    """

    help: str
    module: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Import the module, and add the command's arguments to its parser."""
        import_module(self.module).add_arguments(parser)
