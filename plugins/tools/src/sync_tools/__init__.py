"""The command ``sync-core``, and `StatusServer`, from which ``sync-core watch`` reads.

`sync_tools.main` parses the command line. Each module of `sync_tools.commands` is one command.
`sync_tools.bench` measures a scheme from Python.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_tools.command import Command
    from sync_tools.status import SenderView, StatusServer, WorkerView

__version__ = "0.1.0"

_MODULES = {
    "sync_tools.command": ("Command",),
    "sync_tools.status": ("SenderView", "StatusServer", "WorkerView"),
}

__all__ = ["Command", "SenderView", "StatusServer", "WorkerView", "__version__"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
