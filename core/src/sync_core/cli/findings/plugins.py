"""What the metadata of installed plugins tells: disabled, in conflict, or without what they need.

No plugin is imported for that, so one that hangs or crashes is no danger here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from importlib_metadata import PackageNotFoundError, distribution
from packaging.requirements import Requirement

from sync_core.errors import PluginConflictError
from sync_core.plugins import registry
from sync_core.plugins.finding import Finding
from sync_core.plugins.installed import entry_points_of, owner_of
from sync_core.plugins.requirements import (
    Distribution,
    installed_version,
    is_core,
    is_met,
    requirements_of,
)

_GROUPS = (registry.SCHEMES, registry.LAYERS, registry.WORKERS)


def find() -> Iterator[Finding]:
    """All of it."""
    yield from disabled()
    yield from conflicts()
    yield from unmet_requirements()


def disabled() -> Iterator[Finding]:
    """What ``SYNC_DISABLE`` leaves out, and names in it that nothing has."""
    value = os.environ.get(registry.DISABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    claimed = [(group, entry) for group in _GROUPS for entry in entry_points_of(group)]
    out = [registry.describe(g, entry) for g, entry in claimed if registry.is_disabled(entry)]
    if out:
        yield Finding(
            f"{registry.DISABLE}={value}",
            f"leaves out {', '.join(out)}",
            f"to use them, type: unset {registry.DISABLE}",
        )
    known = {entry.name for _, entry in claimed}
    known |= {owner for _, entry in claimed if (owner := owner_of(entry)[0]) is not None}
    for name in names:
        if name not in known:
            yield Finding(
                f"{registry.DISABLE}={value}",
                f"nothing that is installed is called {name!r}",
                "take it out, or see the names: sync-core list",
            )


def conflicts() -> Iterator[Finding]:
    """Names that several distributions claim."""
    for group in _GROUPS:
        for name in sorted({entry.name for entry in registry.installed(group)}):
            try:
                registry.entry_point(group, name)
            except PluginConflictError as error:
                problem, _, remedy = str(error).partition("; ")
                yield Finding(name, problem, remedy)


def unmet_requirements() -> Iterator[Finding]:
    """Distributions whose requirements are not installed in a version that fits.

    What extras need is not asked: who does without the extra does without that.
    """
    for each in _distributions().values():
        for requirement in requirements_of(each):
            if is_met(requirement):
                continue
            there = installed_version(requirement)
            yield Finding(
                f"{each.name} {each.version}",
                f"needs {requirement}, and {f'{there} is' if there else 'none is'} installed",
                f"type: pip install {_what_to_install(each, requirement)}",
            )


def _what_to_install(asking: Distribution, requirement: Requirement) -> str:
    # The core has other plugins too, so it is the one that does not fit which changes.
    if is_core(requirement):
        return f"-U {asking.name}"
    return f"'{requirement.name}{requirement.specifier}'"


def _distributions() -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    with suppress(PackageNotFoundError):  # its sources alone have no metadata
        found["sync-core"] = distribution("sync-core")
    for group in _GROUPS:
        for entry in registry.installed(group):
            if entry.dist is not None:
                found[entry.dist.name] = entry.dist
    return found
