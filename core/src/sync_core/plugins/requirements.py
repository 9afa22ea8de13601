"""What a distribution asks for in its metadata, and whether that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol

from importlib_metadata import PackageNotFoundError, version
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import sync_core
from sync_core.errors import PluginVersionError

_CORE = "sync-core"


class Distribution(Protocol):
    """What is read of a distribution; the type that has it depends on importlib_metadata."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def requires(self) -> list[str] | None: ...


def requirements_of(distribution: Distribution) -> Iterator[Requirement]:
    """The requirements that hold on this machine; those of extras are left out."""
    for text in distribution.requires or ():
        # pip installs nothing whose requirements cannot be read; other tools may have.
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def core_requirement(distribution: Distribution | None) -> Requirement | None:
    """What a plugin's distribution says of the core that it was made for."""
    known: Any = distribution  # hashable, which the type of importlib_metadata does not say
    return None if distribution is None else _core_requirement(known)


# Every sender and receiver asks, and it takes milliseconds to read.
@lru_cache(maxsize=256)
def _core_requirement(distribution: Distribution) -> Requirement | None:
    return next(filter(is_core, requirements_of(distribution)), None)


def is_core(requirement: Requirement) -> bool:
    """Whether it is the core that is required."""
    return canonicalize_name(requirement.name) == _CORE


def installed_version(requirement: Requirement) -> str | None:
    """The version of what is required that is installed, or None."""
    # Of the core, the one that runs: its sources may lie before what is installed.
    if is_core(requirement):
        return sync_core.__version__
    try:
        return version(requirement.name)
    except PackageNotFoundError:
        return None


def is_met(requirement: Requirement) -> bool:
    """Whether a version that fits is installed; a pre-release counts as one.

    Example:
        >>> is_met(Requirement("sync-core>=0.1")), is_met(Requirement("sync-core<0.1"))
        (True, False)
    """
    found = installed_version(requirement)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def promised_to(core: str) -> str:
    """The requirement of a plugin that uses nothing deprecated in a version of the core.

    What is deprecated by the next minor release still works in that and in the one after it:
    ``docs/reference/stability.md``.

    Example:
        >>> promised_to("0.1.3")
        'sync-core>=0.1,<0.4'
    """
    major, minor = Version(core).release[:2]
    return f"{_CORE}>={major}.{minor},<{major}.{minor + 3}"


def check_core(owner: str, distribution: Distribution | None) -> None:
    """Refuse a plugin that was made for another core.

    Args:
        owner: names the plugin in the message.
        distribution: where it comes from; None is asked nothing.

    Raises:
        PluginVersionError: says which core it was made for, which one this is, and what to type.
    """
    requirement = core_requirement(distribution)
    if distribution is None or requirement is None or is_met(requirement):
        return
    raise PluginVersionError(
        f"{owner} was made for {requirement}, and this is {_CORE} {sync_core.__version__}; "
        f"type: pip install -U {distribution.name}"
    )
