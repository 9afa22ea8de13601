"""``sync-core list``: lists the installed plugins, their distributions, and load errors."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from importlib_metadata import EntryPoint

from sync_core import WorkerGroup, registry
from sync_core.errors import PluginError, RequirementError
from sync_core.hooks import HOOKS, implemented
from sync_core.registry import core_requirement, owner_of
from sync_core.wrapping import WrappingScheme
from sync_tools.tables import print_line, print_table, terminal_width

_TITLES = {
    registry.SCHEMES: "schemes",
    registry.LAYERS: "layers",
    registry.WORKERS: "worker groups",
}
# Entry point groups of other distributions, whose objects are only loaded.
_OTHERS = {
    "sync.environments": "adapters of environments",
    registry.ENDPOINTS: "endpoints of addresses",
}
_DISABLED = f"disabled; to use it, take it out of {registry.DISABLE}"
_GIVEN_TO_EVERY_GROUP = frozenset(inspect.signature(WorkerGroup).parameters)
# In a narrower terminal, whole names do not fit beside the other columns.
_WHOLE = 60


@dataclass(frozen=True, slots=True)
class Listed:
    """One plugin and its metadata, as far as it could be loaded.

    Args:
        kind: ``"schemes"``, ``"layers"``, ``"worker groups"``, ``"adapters of environments"``
            or ``"endpoints of addresses"``.
        name: its name.
        distribution: the distribution that installs it.
        version: the version of the distribution.
        requires: the version of the core that its distribution requires; None if it requires none.
        hooks: the hooks that it implements.
        capabilities: its declared capabilities. A wrapping scheme lists the capabilities that it
            keeps and those that it adds.
        wraps: whether it is a scheme that wraps another.
        options: the ``worker_options`` of a worker group, or the arguments of a layer or wrapping
            scheme; None for other schemes, which read their options when a sender is made.
        disabled: whether ``SYNC_DISABLE`` disables it; it is then not loaded.
        conflicts: other enabled distributions that claim the name.
        needs: the packages to install before it can be used; None if nothing is missing.
        error: why it cannot be used, or None.
    """

    kind: str
    name: str
    distribution: str | None
    version: str | None
    requires: str | None = None
    hooks: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    wraps: bool = False
    options: tuple[str, ...] | None = None
    disabled: bool = False
    conflicts: tuple[str, ...] = ()
    needs: str | None = None
    error: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Shows where each one comes from and what it can do, or why it does not load."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def listed() -> list[Listed]:
    """Return all installed plugins."""
    return [
        _listed(group, title, entry)
        for group, title in (_TITLES | _OTHERS).items()
        for entry in registry.entry_points_of(group)
    ]


def _listed(group: str, kind: str, entry: EntryPoint) -> Listed:
    distribution, version = owner_of(entry)
    required = core_requirement(entry.dist)
    requires = None if required is None else str(required)
    plugin = Listed(kind, entry.name, distribution, version, requires)
    if registry.is_disabled(entry):
        return replace(plugin, disabled=True)
    plugin = replace(plugin, conflicts=_conflicts(group, entry))
    if group in _OTHERS:
        return replace(plugin, error=_import_error(entry))
    try:
        loaded = registry.load(group, registry.entry_point(group, entry.name))
    except RequirementError as error:
        return replace(plugin, needs=str(error))
    except PluginError as error:
        return replace(plugin, error=str(error))
    return replace(
        plugin,
        hooks=tuple(hook for hook in HOOKS if hook in implemented(loaded)),
        capabilities=() if group == registry.LAYERS else tuple(sorted(_declared(loaded))),
        wraps=wraps_another(loaded),
        options=_options(group, loaded),
    )


def _import_error(entry: EntryPoint) -> str | None:
    try:
        entry.load()
    except Exception as error:
        return f"does not import: {error!r}; {registry.how_to_update(owner_of(entry)[0])}"
    return None


def wraps_another(loaded: Any) -> bool:
    """Return whether a loaded plugin is a scheme that wraps another."""
    return inspect.isclass(loaded) and issubclass(loaded, WrappingScheme)


def _declared(loaded: Any) -> frozenset[str]:
    declared: frozenset[str] = (
        loaded.keeps | loaded.adds if wraps_another(loaded) else loaded.capabilities
    )
    return declared


def _conflicts(group: str, entry: EntryPoint) -> tuple[str, ...]:
    others = (each for each in registry.installed(group) if each.name == entry.name)
    names = (owner_of(each)[0] for each in others)
    return tuple(name for name in names if name and name != owner_of(entry)[0])


def _options(group: str, loaded: Any) -> tuple[str, ...] | None:
    if wraps_another(loaded):
        return tuple(name for name in inspect.signature(loaded).parameters if name != "inner")
    if group == registry.SCHEMES:
        return None
    if group == registry.WORKERS:
        given = inspect.signature(loaded).parameters
        return tuple(name for name in given if name not in _GIVEN_TO_EVERY_GROUP)
    # A module, or an object that needs no arguments, is used as it is.
    return tuple(inspect.signature(loaded).parameters) if inspect.isclass(loaded) else ()


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if rest:
        parser.error(f"list has no {' '.join(rest)!r}")
    plugins = listed()
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(plugin) for plugin in plugins], indent=2) + "\n")
        return 0
    for group, title in (_TITLES | _OTHERS).items():
        of_kind = [plugin for plugin in plugins if plugin.kind == title]
        if of_kind:
            sys.stdout.write(f"{title}\n")
            _print(of_kind)
            sys.stdout.write("\n")
        elif group in _TITLES:
            sys.stdout.write(f"{title}: none is installed; to install some, type:\n")
            _print_known(group)
    for plugin in plugins:
        if remark := _remark(plugin):
            # Printed below the table, which would break the lines to type.
            print_line(f"{plugin.name}: {remark}", _colour(plugin))
    return 0


def _print_known(group: str) -> None:
    known = registry.KNOWN[group]
    for distribution in dict.fromkeys(known.values()):
        names = ", ".join(name for name, owner in known.items() if owner == distribution)
        sys.stdout.write(f"  pip install {distribution}  # {names}\n")


def _print(plugins: list[Listed]) -> None:
    # Users type these names: they stay whole if possible, and are wrapped rather than cut.
    width = terminal_width()
    print_table(
        ("name", "distribution", "version", "hooks", "capabilities"),
        [
            (
                plugin.name,
                plugin.distribution,
                plugin.version,
                ", ".join(plugin.hooks),
                "see below" if _remark(plugin) else _capabilities(plugin),
            )
            for plugin in plugins
        ],
        whole={"name", "distribution"} if width is None or width >= _WHOLE else (),
        colours=[_colour(plugin) for plugin in plugins],
    )


def _capabilities(plugin: Listed) -> str:
    listed = ", ".join(plugin.capabilities)
    if not plugin.wraps:
        return listed
    # Shown because the caller must choose among several senders.
    joined = "joined" in plugin.capabilities
    typed = f"as an object with {', '.join(plugin.options or ())}"
    return f"wraps another: {typed if joined else f'{plugin.name}::shm'}; keeps {listed}"


def _colour(plugin: Listed) -> str | None:
    return "red" if plugin.error else "yellow" if plugin.disabled or plugin.needs else None


def _remark(plugin: Listed) -> str | None:
    """Return why a plugin cannot be used, and what to type."""
    return _DISABLED if plugin.disabled else plugin.error or plugin.needs
