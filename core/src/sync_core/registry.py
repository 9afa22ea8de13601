"""Finds plugins by name among the entry points of installed distributions."""

from __future__ import annotations

import difflib
import inspect
import os
from abc import ABC
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from importlib_metadata import EntryPoint
from packaging.requirements import Requirement

from sync_core.distributions import (
    COMMANDS,
    ENDPOINTS,
    INSTEAD,
    KNOWN,
    LAYERS,
    OURS,
    SCHEMES,
    WORKERS,
    DistributionInfo,
    check_core,
    core_remedy,
    core_requirement,
    entry_points_of,
    how_to_update,
    installed_version,
    is_core,
    is_met,
    owner_of,
    requirements_of,
)
from sync_core.errors import (
    NotAPluginError,
    OptionError,
    PluginConflictError,
    PluginImportError,
    PluginNotFoundError,
    RequirementError,
)
from sync_core.hooks import (
    LAYER_CAPABILITIES,
    SCHEME_CAPABILITIES,
    WORKER_CAPABILITIES,
    check_hooks,
)
from sync_core.report import Reporter
from sync_core.worker_group import WorkerGroup

__all__ = [
    "COMMANDS",
    "DISABLE",
    "ENDPOINTS",
    "KNOWN",
    "LAYERS",
    "OURS",
    "SCHEMES",
    "WORKERS",
    "DistributionInfo",
    "Plugin",
    "core_remedy",
    "core_requirement",
    "describe",
    "entry_point",
    "entry_points_of",
    "find",
    "how_to_update",
    "imported",
    "installed",
    "installed_version",
    "is_core",
    "is_disabled",
    "is_met",
    "load",
    "owner_of",
    "requirements_of",
    "wrapper",
]

#: The environment variable that names plugins to be left out.
DISABLE = "SYNC_DISABLE"

_KINDS = {
    SCHEMES: "scheme",
    LAYERS: "layer",
    WORKERS: "worker group",
    ENDPOINTS: "endpoint of addresses",
    COMMANDS: "command",
}
_CAPABILITIES = MappingProxyType(
    {SCHEMES: SCHEME_CAPABILITIES, LAYERS: LAYER_CAPABILITIES, WORKERS: WORKER_CAPABILITIES}
)
# How much of a name has to agree for a typing error: "late-join" does, "push" does not.
_ALIKE = 0.75
#: Between the names of a chain.
SEPARATOR = "::"
_LAYER_HOOKS = ("prepare_weights", "apply_weights", "skip_update")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that was found.

    Args:
        group: the entry point group that it was looked up in.
        name: its name there, or its type's name when it was given as an object.
        object: the scheme or layer itself, or the worker group's class.
        distribution: the distribution that it came from, or None.
        version: that distribution's version, or None.
    """

    group: str
    name: str
    object: Any
    distribution: str | None = None
    version: str | None = None

    @property
    def capabilities(self) -> frozenset[str]:
        """Return the capabilities that the plugin declares."""
        declared: frozenset[str] = self.object.capabilities
        return declared

    @property
    def innermost(self) -> Plugin:
        """Return the scheme that moves the bytes: of a chain, the last one."""
        scheme = self.object
        return scheme.plugin.innermost if isinstance(scheme, OuterScheme) else self

    def describe(self) -> str:
        """The plugin's kind, name, distribution and version, for messages."""
        return _describe(self.group, self.name, self.distribution, self.version)


@dataclass(frozen=True)
class OuterScheme(ABC):
    """A scheme that is made of another one: the part of `WrappingScheme` that finds plugins."""

    inner: Any

    wrapper: ClassVar[str]

    @cached_property
    def plugin(self) -> Plugin:
        """The inner scheme.

        Raises:
            PluginError: it cannot be found or used.
            OptionError: it moves nothing.
        """
        found = find(SCHEMES, self.inner)
        if "same_object" in found.capabilities:
            raise OptionError(
                f"{found.describe()} moves nothing, so that {self.wrapper}{SEPARATOR} is of no "
                f"use; type scheme={found.name!r}, or {self.wrapper}{SEPARATOR}shm"
            )
        return found

    @property
    def name(self) -> str:
        """The chain of names, by which messages and reports name the scheme."""
        return f"{self.wrapper}{SEPARATOR}{self.plugin.name}"


def find(group: str, name: Any) -> Plugin:
    """The plugin of a name, loaded; no other is.

    Args:
        group: ``"sync.schemes"``, ``"sync.layers"`` or ``"sync.workers"``.
        name: its name, or a plugin object (or class, or module) to be used as it is. Where several
            distributions claim the name, ``"sync-plugin-std:shm"`` says whose. Of schemes also a
            chain, such as ``"increments::dist"``: the names of schemes that wrap others,
            from the outside in, and last the one that is wrapped.

    Raises:
        PluginNotFoundError: nothing installed has the name; says what to install or to type.
        PluginConflictError: two distributions claim the name.
        PluginVersionError: it was made for another core; it is not imported.
        PluginImportError: it does not import; the cause is chained.
        NotAPluginError: it is something else, or a class that needs arguments.
        UnknownHookError: it has a hook that does not exist, or with other arguments.
        RequirementError: it cannot be made before what the message says is installed.

    Example:
        >>> find("sync.schemes", "shm").distribution
        'sync-plugin-std'
    """
    if isinstance(name, str):
        outer, separator, inner = name.partition(SEPARATOR)
        if group == SCHEMES and separator:
            return _chain(outer, inner)
        entry = entry_point(group, name)
        plugin = Plugin(group, name, load(group, entry), *owner_of(entry))
    else:
        plugin = Plugin(group, _name_of(name), name)
        plugin = replace(plugin, object=_made(plugin.describe(), group, name))
    if inspect.isclass(plugin.object) and group != WORKERS:
        if issubclass(plugin.object, OuterScheme):
            raise NotAPluginError(
                f"{plugin.describe()} wraps another scheme; type {plugin.name}{SEPARATOR}shm, or "
                f"{plugin.object.__name__}('shm')"
            )
        raise NotAPluginError(
            f"{plugin.describe()} needs arguments; give an object, such as "
            f"{plugin.object.__name__}(…), instead"
        )
    return plugin


def wrapper(name: str) -> type[OuterScheme]:
    """Return the class of a scheme that wraps others, by the name of its entry point.

    Raises:
        NotAPluginError: the scheme does not wrap others.
        PluginError: see `find`.

    Example:
        >>> wrapper("increments")("dist", below=0.5).name
        'increments::dist'
    """
    entry = entry_point(SCHEMES, name)
    kind = load(SCHEMES, entry)
    if not (inspect.isclass(kind) and issubclass(kind, OuterScheme)):
        raise NotAPluginError(
            f"{describe(SCHEMES, entry)} does not wrap another scheme; type scheme={name!r}"
        )
    return kind


def _chain(outer: str, inner: str) -> Plugin:
    """Return the scheme of a chain of names."""
    kind = wrapper(outer)
    if _needs_arguments(kind, inner):
        needed = [f.name for f in fields(kind) if f.default is MISSING is f.default_factory]
        typed = ", ".join([repr(inner), *needed[1:]])
        raise NotAPluginError(
            f"{describe(SCHEMES, entry_point(SCHEMES, outer))} needs arguments; type "
            f"{kind.__name__}({typed})"
        )
    made = kind(inner)
    return Plugin(SCHEMES, made.name, made, *owner_of(entry_point(SCHEMES, outer)))


def load(group: str, entry: EntryPoint) -> Any:
    """The plugin that an entry point refers to; a class that needs arguments stays a class.

    Raises:
        PluginVersionError: it was made for another core; it is not imported.
        PluginImportError: it does not import; the cause is chained.
        NotAPluginError: it is something else.
        UnknownHookError: it has a hook that does not exist, or with other arguments.
        RequirementError: it cannot be made before what the message says is installed.
    """
    owner = describe(group, entry)
    return _made(owner, group, imported(owner, entry))


def imported(owner: str, entry: EntryPoint) -> Any:
    """Return the object that an entry point refers to; ``owner`` names it in messages.

    Raises:
        PluginVersionError: it was made for another core; it is not imported.
        PluginImportError: it does not import; the cause is chained.
        RequirementError: it says what must be installed first.
    """
    check_core(owner, entry.dist)
    try:
        return entry.load()
    except RequirementError as error:
        raise RequirementError(f"{owner}: {error}") from error
    except Exception as error:
        distribution, _ = owner_of(entry)
        raise PluginImportError(
            f"{owner} does not import: {type(error).__name__}: {error}; "
            f"{how_to_update(distribution)}, or leave it out: {DISABLE}={distribution}"
        ) from error


def installed(group: str) -> list[EntryPoint]:
    """The entry points of a group, sorted by name; a distribution seen twice counts once.

    Names in the environment variable ``SYNC_DISABLE``, divided by commas, are left out; a plugin
    can be named by its distribution too.
    """
    return [entry for entry in entry_points_of(group) if not is_disabled(entry)]


def describe(group: str, entry: EntryPoint) -> str:
    """The kind, name, distribution and version of what an entry point refers to."""
    return _describe(group, entry.name, *owner_of(entry))


def is_disabled(entry: EntryPoint) -> bool:
    """Return whether ``SYNC_DISABLE`` names the plugin or its distribution."""
    disabled = {name.strip() for name in os.environ.get(DISABLE, "").split(",")}
    return bool(disabled & {entry.name, owner_of(entry)[0]})


def entry_point(group: str, name: str) -> EntryPoint:
    """The only entry point of a name, not loaded.

    Args:
        group: the group.
        name: the name; where several distributions claim it, one of them may stand before it, as in
            ``"sync-plugin-std:shm"``.

    Raises:
        PluginNotFoundError: there is none.
        PluginConflictError: there are several.
    """
    owner, _, own = name.rpartition(":")
    entries = [
        entry
        for entry in installed(group)
        if entry.name == own and (not owner or owner_of(entry)[0] == owner)
    ]
    if not entries:
        raise PluginNotFoundError(_not_found(group, name))
    if len(entries) > 1:
        owners = [" ".join(map(str, owner_of(entry))) for entry in entries]
        # Ours has other plugins too, which would go with it.
        names = [owner_of(entry)[0] for entry in reversed(entries)]
        other = max(names, key=lambda owner: owner != KNOWN[group].get(name))
        raise PluginConflictError(
            f"{len(entries)} distributions claim the {_KINDS[group]} {name!r}: "
            f"{' and '.join(owners)}; name one, as {names[-1]}:{name}, or remove one, for "
            f"example: pip uninstall {other}; or set {DISABLE}={other}"
        )
    return entries[0]


def _not_found(group: str, name: str) -> str:
    kind, known = _KINDS[group], KNOWN[group]
    there = sorted({entry.name for entry in installed(group)})
    if any(entry.name == name and is_disabled(entry) for entry in entry_points_of(group)):
        return f"{kind} {name!r} is disabled; to use it, take it out of {DISABLE}"
    message = f"no {kind} {name!r} is installed"
    near = difflib.get_close_matches(name.lower(), {*there, *known}, n=1)
    instead = INSTEAD if group == SCHEMES else {}
    typed, owner = instead.get(name.lower().replace("-", "_"), ("", ""))
    if name in known:
        message += f"; type: pip install {known[name]}"
    elif typed:
        there_first = "" if installed_version(Requirement(owner)) else f"pip install {owner}, then "
        message += f"; type: {there_first}{typed}"
    elif near:
        message += f"; did you mean {near[0]!r}?"
        if near[0] not in there:
            message += f" Then type: pip install {known[near[0]]}"
    if name not in known and not typed and group != COMMANDS:
        message += "; for a plugin of your own, type in its folder: pip install -e ."
    return f"{message} (installed: {', '.join(there) or 'none'})"


def _made(owner: str, group: str, given: Any) -> Any:
    made = given
    if inspect.isclass(given) and group != WORKERS and not _needs_arguments(given):
        try:
            made = given()
        except RequirementError as error:
            raise RequirementError(f"{owner}: {error}") from error
        except Exception as error:
            raise PluginImportError(
                f"{owner}: {given.__name__}() failed: {type(error).__name__}: {error}"
            ) from error
    _check(owner, group, made)
    _check_capabilities(owner, group, made)
    return made


def _needs_arguments(given: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a call needs more arguments than these, or other ones."""
    try:
        inspect.signature(given).bind(*arguments)
    except (TypeError, ValueError):
        # ValueError: of some that are built in, Python does not know what they take.
        return True
    return False


def _name_of(given: Any) -> str:
    if isinstance(given, OuterScheme):
        return given.name
    if inspect.isclass(given) or inspect.ismodule(given):
        return given.__name__
    return type(given).__name__


def _check(owner: str, group: str, plugin: Any) -> None:
    if group == WORKERS:
        if not (inspect.isclass(plugin) and issubclass(plugin, WorkerGroup)):
            raise NotAPluginError(f"{owner} is not a subclass of sync_core.WorkerGroup")
        return
    hooks = check_hooks(owner, plugin)
    if group == LAYERS:
        if "create_transport" in hooks:
            raise NotAPluginError(
                f"{owner} has create_transport, which would take the place of the scheme's; give "
                "it as scheme=, or leave that hook out of the layer"
            )
        if not set(hooks) & set(_LAYER_HOOKS) and not (
            issubclass(plugin if inspect.isclass(plugin) else type(plugin), Reporter)
        ):
            raise NotAPluginError(
                f"{owner} has none of {', '.join(_LAYER_HOOKS)} marked with @sync_core.hookimpl, "
                "and is not a sync_core.Reporter"
            )
        return
    if "create_transport" not in hooks:
        there = f"; it has: {', '.join(hooks)}" if hooks else ""
        raise NotAPluginError(
            f"{owner} has no create_transport marked with @sync_core.hookimpl{there}"
        )
    if inspect.isclass(plugin) and issubclass(plugin, OuterScheme):
        return
    if not isinstance(getattr(plugin, "capabilities", None), frozenset):
        raise NotAPluginError(
            f"{owner} declares no capabilities; add one line: capabilities = frozenset()"
        )


def _check_capabilities(owner: str, group: str, plugin: Any) -> None:
    """Refuse a capability that looks like one which the core knows; others are the plugin's."""
    known = _CAPABILITIES[group]
    declared = getattr(plugin, "capabilities", None)
    # A class that needs arguments may have a property.
    for name in sorted(declared - known.keys()) if isinstance(declared, AbstractSet) else ():
        near = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        if near:
            raise NotAPluginError(
                f"{owner} declares the capability {name!r}, which the core does not know; did you "
                f"mean {near[0]!r}? The core knows: {', '.join(known)}"
            )


def _describe(group: str, name: str, distribution: str | None, version: str | None) -> str:
    source = f" ({distribution} {version})" if distribution else ""
    return f"{_KINDS[group]} {name!r}{source}"
