"""Worker groups, and the kit that others are made from: processes, calls of workers, launching.

Reading begins at `sync_core.WorkerGroup`, the interface; `process_group` is the group ``process``.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_plugin_std.workers.calls import (
        CallOutcome,
        RemoteCall,
        close_hosted,
        gather,
        pickle_factory,
    )
    from sync_plugin_std.workers.choice import check_worker_options, choose_group, shares_policy
    from sync_plugin_std.workers.inline_group import InlineGroup
    from sync_plugin_std.workers.launching import LaunchedGroup, LaunchedWorker, Launcher
    from sync_plugin_std.workers.process_group import ProcessGroup
    from sync_plugin_std.workers.processes import (
        WorkerProcess,
        fork_server_pids,
        preload,
        start_process,
    )
    from sync_plugin_std.workers.thread_group import ThreadGroup
    from sync_plugin_std.workers.tracebacks import describe_failure

_MODULES = {
    "sync_plugin_std.workers.calls": (
        "CallOutcome",
        "RemoteCall",
        "close_hosted",
        "gather",
        "pickle_factory",
    ),
    "sync_plugin_std.workers.choice": ("check_worker_options", "choose_group", "shares_policy"),
    "sync_plugin_std.workers.inline_group": ("InlineGroup",),
    "sync_plugin_std.workers.launching": ("LaunchedGroup", "LaunchedWorker", "Launcher"),
    "sync_plugin_std.workers.process_group": ("ProcessGroup",),
    "sync_plugin_std.workers.processes": (
        "WorkerProcess",
        "fork_server_pids",
        "preload",
        "start_process",
    ),
    "sync_plugin_std.workers.thread_group": ("ThreadGroup",),
    "sync_plugin_std.workers.tracebacks": ("describe_failure",),
}

__all__ = [
    "CallOutcome",
    "InlineGroup",
    "LaunchedGroup",
    "LaunchedWorker",
    "Launcher",
    "ProcessGroup",
    "RemoteCall",
    "ThreadGroup",
    "WorkerProcess",
    "check_worker_options",
    "choose_group",
    "close_hosted",
    "describe_failure",
    "fork_server_pids",
    "gather",
    "pickle_factory",
    "preload",
    "shares_policy",
    "start_process",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
