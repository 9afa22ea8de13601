"""Which worker group goes with which scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sync_core import registry
from sync_core.errors import OptionError
from sync_core.workers import WorkerGroup


def choose_group(schemes: Sequence[Any], workers: Any) -> type[WorkerGroup]:
    """The class of worker group that was asked for, or the one that suits the schemes.

    That is the group of a scheme's own name where there is one, else ``process`` if the scheme
    moves weights between processes, else ``inline``. Of several schemes, the first that moves none
    between processes decides, or else the first.

    Args:
        schemes: names or objects of schemes.
        workers: a group's name or class; None to choose.

    Raises:
        PluginError: scheme or group cannot be found or used.
        OptionError: workers in other processes cannot share the trainer's own policy.
    """
    plugins = [registry.find(registry.SCHEMES, scheme) for scheme in schemes]
    within = [plugin for plugin in plugins if "cross_process" not in plugin.capabilities]
    plugin = (within or plugins)[0]
    if workers is None:
        workers = _default_group(plugin)
    group: type[WorkerGroup] = registry.find(registry.WORKERS, workers).object
    if "same_object" in plugin.capabilities and "cross_process" in group.capabilities:
        raise OptionError(
            f"{plugin.describe()} lets workers act with the trainer's own policy, which worker "
            f"group {workers!r} has in another process; use scheme='shm', or workers='inline'"
        )
    return group


def shares_policy(scheme: Any) -> bool:
    """Whether workers act with the trainer's own object under this scheme."""
    return "same_object" in registry.find(registry.SCHEMES, scheme).capabilities


def _default_group(scheme: registry.Plugin) -> str:
    names = {entry.name for entry in registry.installed(registry.WORKERS)}
    if scheme.name in names:
        return scheme.name
    return "process" if "cross_process" in scheme.capabilities else "inline"
