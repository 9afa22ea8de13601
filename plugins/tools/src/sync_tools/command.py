"""The interface of a command of ``sync-core``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``sync-core``, declared as an entry point of a distribution.

    Register an instance in the entry point group ``sync.commands`` under the command's name. The
    module is imported when the command is used, so ``sync-core --help`` stays fast. The module's
    ``add_arguments(parser)`` adds the command's arguments to an `argparse.ArgumentParser`, and sets
    the default ``run``. ``run(arguments, unknown, parser)`` gets the parsed arguments, a list of
    unknown ones, and the parser; it returns the exit status.

    Args:
        help: the command's line in ``sync-core --help``.
        module: the name of the module with ``add_arguments``.

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
