"""The choice of a worker group for a scheme."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from sync_core import WorkerGroup, registry
from sync_core.checks import check_mapping
from sync_core.errors import OptionError


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
        OptionError: by what they declare, the scheme cannot reach workers of that group.
    """
    plugins = [registry.find(registry.SCHEMES, scheme) for scheme in schemes]
    within = [plugin for plugin in plugins if "cross_process" not in plugin.capabilities]
    if workers is None:
        workers = _default_group((within or plugins)[0])
    found = registry.find(registry.WORKERS, workers)
    for plugin in plugins:
        _check_together(plugin, found)
    group: type[WorkerGroup] = found.object
    return group


def check_worker_options(group: type[WorkerGroup], options: Mapping[str, Any]) -> None:
    """Raise unless a worker group can be given these options.

    Raises:
        TypeError: they are not a mapping.
        OptionError: one that the group does not have.
    """
    check_mapping(options, "worker_options", "{'torch_threads': 1}")
    # After the factory and the number of workers, which are given by position.
    parameters = list(inspect.signature(group).parameters.values())[2:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {parameter.name for parameter in parameters if parameter.kind in by_name} - {"timeout"}
    for name in options:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise OptionError(f"{group.__name__} has no option {name!r}; its options are: {listed}")


def shares_policy(scheme: Any) -> bool:
    """Return whether workers act with the trainer's own object under this scheme."""
    return "same_object" in registry.find(registry.SCHEMES, scheme).capabilities


def _default_group(scheme: registry.Plugin) -> str:
    names = {entry.name for entry in registry.installed(registry.WORKERS)}
    # Without the distribution that stands before it where several claim the name.
    name = scheme.innermost.name.rpartition(":")[2]
    if name in names:
        return name
    return "process" if "cross_process" in scheme.capabilities else "inline"


def _check_together(scheme: registry.Plugin, group: registry.Plugin) -> None:
    if "cross_process" not in group.capabilities:
        return
    if "same_object" in scheme.capabilities:
        raise OptionError(
            f"{scheme.describe()} lets workers act with the trainer's own policy, and those of "
            f"{group.describe()} are in other processes; use scheme='shm', or workers='inline'"
        )
    if "cross_process" not in scheme.capabilities:
        raise OptionError(
            f"{scheme.describe()} moves weights within a process, and the workers of "
            f"{group.describe()} are in others; use scheme='shm', or workers='thread'"
        )
    if "descriptors" in scheme.capabilities - group.capabilities:
        raise OptionError(
            f"{scheme.describe()} gives each worker an open file, and {group.describe()} cannot "
            "pass it on; use workers='process', or scheme='dist'"
        )
