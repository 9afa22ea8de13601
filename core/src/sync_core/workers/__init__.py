"""The kit for worker groups: processes, calls of workers, and their ids."""

from typing import TYPE_CHECKING

from sync_core._lazy import lazy_names

if TYPE_CHECKING:
    from sync_core._util import release_with
    from sync_core.group_choice import check_worker_options, choose_group, shares_policy
    from sync_core.workers.calls import (
        CallOutcome,
        RemoteCall,
        close_hosted,
        gather,
        pickle_factory,
    )
    from sync_core.workers.launching import LaunchedGroup, LaunchedWorker, Launcher
    from sync_core.workers.processes import (
        WorkerProcess,
        fork_server_pids,
        preload,
        start_process,
    )
    from sync_core.workers.worker_group import WorkerGroup
    from sync_core.workers.worker_ids import normalize


_MODULES = {
    "sync_core._util": ("release_with",),
    "sync_core.group_choice": ("check_worker_options", "choose_group", "shares_policy"),
    "sync_core.workers.calls": (
        "CallOutcome",
        "RemoteCall",
        "close_hosted",
        "gather",
        "pickle_factory",
    ),
    "sync_core.workers.launching": ("LaunchedGroup", "LaunchedWorker", "Launcher"),
    "sync_core.workers.processes": (
        "WorkerProcess",
        "fork_server_pids",
        "preload",
        "start_process",
    ),
    "sync_core.workers.worker_group": ("WorkerGroup",),
    "sync_core.workers.worker_ids": ("normalize",),
}

__all__ = [
    "CallOutcome",
    "LaunchedGroup",
    "LaunchedWorker",
    "Launcher",
    "RemoteCall",
    "WorkerGroup",
    "WorkerProcess",
    "check_worker_options",
    "choose_group",
    "close_hosted",
    "fork_server_pids",
    "gather",
    "normalize",
    "pickle_factory",
    "preload",
    "release_with",
    "shares_policy",
    "start_process",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
