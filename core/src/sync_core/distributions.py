"""Read from installed distributions their entry points, and the core that they were made for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from importlib_metadata import (
    Distribution,
    EntryPoint,
    EntryPoints,
    PackageNotFoundError,
    entry_points,
    version,
)
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import sync_core
from sync_core.errors import PluginVersionError

__all__ = [
    "OURS",
    "DistributionInfo",
    "check_core",
    "core_remedy",
    "core_requirement",
    "entry_points_of",
    "how_to_update",
    "installed_version",
    "is_core",
    "is_met",
    "owner_of",
    "requirements_of",
]

_CORE = "sync-core"
#: The distributions of this project. An error advises to install these by name, and no others: a
#: name of PyPI may belong to others.
OURS = frozenset(
    (
        *(_CORE, "sync-collector", "sync-testing", "sync-tools"),
        *(f"sync-plugin-{name}" for name in ("dist", "ray", "scale", "std", "store")),
        *(f"sync-plugin-{name}" for name in ("torchrl", "trl", "verl", "vllm")),
    )
)
SCHEMES = "sync.schemes"
LAYERS = "sync.layers"
WORKERS = "sync.workers"
ENDPOINTS = "sync.endpoints"
COMMANDS = "sync.commands"

_STD, _SCALE = "sync-plugin-std", "sync-plugin-scale"
_RAY, _DIST, _STORE = "sync-plugin-ray", "sync-plugin-dist", "sync-plugin-store"
#: Where the names live that this project publishes.
KNOWN = MappingProxyType(
    {
        SCHEMES: {
            **dict.fromkeys(("chunked", "increments", "sharded", "two_phase"), _SCALE),
            **dict.fromkeys(("none", "thread", "shm", "mp", "file"), _STD),
            "ray": _RAY,
            "store": _STORE,
            **dict.fromkeys(("dist", "rpc"), _DIST),
        },
        LAYERS: dict.fromkeys(
            (
                *("bf16", "fp16", "fp8", "zstd", "keep", "lora", "select"),
                *("rename", "fuse", "split", "stack", "unstack", "transpose"),
                *("finite", "interval", "metrics"),
            ),
            _STD,
        ),
        WORKERS: {
            **dict.fromkeys(("inline", "thread", "process"), _STD),
            "ray": _RAY,
            "rpc": _DIST,
        },
        ENDPOINTS: {"pool": _SCALE},
        COMMANDS: {
            **dict.fromkeys(("list", "doctor", "bench", "plan"), "sync-tools"),
            **dict.fromkeys(("watch", "report", "check-history", "new-plugin"), "sync-tools"),
            "serve": _STORE,
            "tune-env": "sync-collector",
        },
    }
)
_GLOO = 'Sender("dist", …, backend="gloo")', _DIST
_BUCKET = 'Sender("store", …, url="s3://bucket/run", key=key)', _STORE
_SHARDED = 'Sender(sync_plugin_scale.Sharded("dist", rank, world_size), model, …)', _SCALE
#: For names that schemes of other projects, or backends and libraries, have: what to type instead,
#: and the distribution that has it.
INSTEAD = MappingProxyType(
    {
        "nccl": ('Sender("dist", …, backend="nccl")', _DIST),
        **dict.fromkeys(("gloo", "mpi", "ucc", "tcp", "socket", "sockets", "broadcast"), _GLOO),
        **dict.fromkeys(("torch", "torch.distributed", "distributed", "c10d", "ddp"), _GLOO),
        **dict.fromkeys(("process_group", "torchrun", "network"), _GLOO),
        **dict.fromkeys(
            ("grpc", "tensorpipe", "torch.distributed.rpc"), ('Sender("rpc", …)', _DIST)
        ),
        **dict.fromkeys(("s3", "gs", "gcs", "r2", "azure", "bucket", "http", "https"), _BUCKET),
        **dict.fromkeys(("fsdp", "fsdp2", "dtensor", "megatron", "deepspeed"), _SHARDED),
        **dict.fromkeys(("multiprocessing", "process", "pipe"), ('Sender("mp", …)', _STD)),
        **dict.fromkeys(("threading", "threads", "local"), ('Sender("thread", …)', _STD)),
        **dict.fromkeys(("shared_memory", "shmem", "sharedmem"), ('Sender("shm", …)', _STD)),
        **dict.fromkeys(
            ("disk", "directory", "filesystem", "nfs"),
            ('Sender("file", …, directory="/mnt/run")', _STD),
        ),
        "rllib": ('Sender("ray", …)', _RAY),
        "vllm": ("sync_plugin_vllm.VllmTarget(…)", "sync-plugin-vllm"),
        "verl": ("backend=sync_core in verl's checkpoint_engine", "sync-plugin-verl"),
        "trl": ("sync_plugin_trl.SyncCallback(…)", "sync-plugin-trl"),
        "torchrl": ("sync_plugin_torchrl.Scheme(…)", "sync-plugin-torchrl"),
    }
)
# Operators of requirements that an older version does not meet.
_LEAST = frozenset({">=", ">", "~=", "=="})


class DistributionInfo(Protocol):
    """The part of a distribution's interface that is read here."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def version(self) -> str:
        """The version."""

    @property
    def requires(self) -> list[str] | None:
        """The requirements."""


def requirements_of(distribution: DistributionInfo) -> Iterator[Requirement]:
    """The requirements that hold on this machine; those of extras are left out."""
    for text in distribution.requires or ():
        # pip installs nothing whose requirements cannot be read; other tools may have.
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def core_requirement(distribution: DistributionInfo | None) -> Requirement | None:
    """Return a plugin's requirement of the core."""
    known: Any = distribution  # hashable, which the type of importlib_metadata does not say
    return None if distribution is None else _core_requirement(known)


# Every sender and receiver asks, and it takes milliseconds to read.
@lru_cache(maxsize=256)
def _core_requirement(distribution: DistributionInfo) -> Requirement | None:
    return next(filter(is_core, requirements_of(distribution)), None)


def is_core(requirement: Requirement) -> bool:
    """Return whether it is the core that is required."""
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
    """Return whether a version that fits is installed; a pre-release counts as one.

    Example:
        >>> is_met(Requirement("sync-core>=0.1")), is_met(Requirement("sync-core<0.1"))
        (True, False)
    """
    found = installed_version(requirement)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def check_core(owner: str, distribution: DistributionInfo | None) -> None:
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
        f"{core_remedy(distribution.name, requirement)}"
    )


def core_remedy(plugin: str, requirement: Requirement) -> str:
    """Return what to do where a plugin's requirement of the core is not met.

    Example:
        >>> core_remedy("sync-plugin-std", Requirement("sync-core<0.1"))
        'type: pip install -U sync-plugin-std'
        >>> core_remedy("my-transport", Requirement("sync-core>=7"))
        "type: pip install -U 'sync-core>=7'"
    """
    core = Version(sync_core.__version__)
    least = [each.version for each in requirement.specifier if each.operator in _LEAST]
    if any(Version(each.removesuffix(".*")) > core for each in least):
        return f"type: pip install -U '{_CORE}{requirement.specifier}'"
    # The core has other plugins too, so it is the one that does not fit which changes.
    return how_to_update(plugin)


def how_to_update(distribution: str | None) -> str:
    """Return what to do for a newer version of an installed distribution.

    Example:
        >>> how_to_update("sync-plugin-std"), how_to_update("my-transport")
        ('type: pip install -U sync-plugin-std', 'update my-transport from where you have it')
    """
    name = canonicalize_name(distribution or "")
    if name in OURS:
        return f"type: pip install -U {name}"
    return f"update {distribution or 'it'} from where you have it"


def entry_points_of(group: str) -> list[EntryPoint]:
    """The entry points of a group, sorted by name; a distribution seen twice counts once.

    Every sender and receiver looks plugins up, and to read the metadata of all distributions takes
    tens of milliseconds. Installing or removing changes the folder, by which
    `importlib_metadata` tells too whether its own list of such a folder still holds.

    Args:
        group: such as ``"sync.schemes"``.

    Example:
        >>> "bf16" in {entry.name for entry in entry_points_of("sync.layers")}
        True
    """
    found = _read(tuple(map(_state_of, sys.path))).select(group=group)
    return sorted(found, key=lambda entry: (entry.name, str(owner_of(entry))))


def owner_of(entry: EntryPoint) -> tuple[str | None, str | None]:
    """The name and version of the distribution that an entry point comes from."""
    known: Any = entry.dist  # hashable, which its type does not say
    return (None, None) if entry.dist is None else _name_and_version(known)


@lru_cache(maxsize=1)
def _read(path: object) -> EntryPoints:
    del path  # whose entry points these are
    return entry_points()


def _state_of(folder: str) -> object:
    try:
        found = Path(folder).stat()
    except OSError:
        return folder
    return folder, found.st_dev, found.st_ino, found.st_mtime_ns


# As many as there may be with plugins; those that are gone must not be kept for ever.
@lru_cache(maxsize=256)
def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    return distribution.name, distribution.version
