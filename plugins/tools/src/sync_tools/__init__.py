"""The command ``sync-core``: list, doctor, bench, plan, watch, report and new-plugin.

`sync_tools.main` parses the command line, each module of `sync_tools.commands` is one command, and
`sync_tools.bench` measures a scheme for programs.
"""

from sync_tools.command import Command

__version__ = "0.1.0"

__all__ = ["Command", "__version__"]
