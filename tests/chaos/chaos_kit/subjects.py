"""The schemes that are put to the test, each with its options and the workers that suit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from sync_core import WorkerGroup, registry


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A scheme to be tried.

    Args:
        scheme: the name of an installed scheme, or a plugin object.
        group: the name of the worker group.
        options: options of the scheme.
        shares: whether readers may look at memory that the trainer, or its host, writes to.
        timeout: the sender's, in seconds; long enough for a machine that is busy.
        deadline: that of a send to workers that will be silent.
        collective: whether all workers are reached together: where one has failed, the others need
            new connections.
        alone: whether this machine can have its workers for one process only at a time.
        late_connections: see `Resources`.
    """

    scheme: Any
    group: str
    options: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = False
    timeout: float = 20.0
    deadline: float = 1.5
    collective: bool = False
    alone: bool = False
    late_connections: int = 0

    @cached_property
    def group_class(self) -> type[WorkerGroup]:
        """The worker group."""
        found: type[WorkerGroup] = registry.find(registry.WORKERS, self.group).object
        return found

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """Return what the scheme declares."""
        return registry.find(registry.SCHEMES, self.scheme).capabilities

    @property
    def processes(self) -> bool:
        """Return whether the workers are their own processes, which can be hurt."""
        return "cross_process" in self.group_class.capabilities


# Small parts, so that a version of the model here takes several.
_PARTS = {"bucket_mb": 0.2}

#: The schemes of this project, by name; `dist` thrice, as there are three ways to a worker.
SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "thread": Subject(scheme="thread", group="thread", shares=True),
        "shm": Subject(scheme="shm", group="process", shares=True),
        "mp": Subject(scheme="mp", group="process", shares=True),
        "dist": Subject(scheme="dist", group="process", shares=True, options=_PARTS),
        "dist-gloo": Subject(
            scheme="dist", group="process", options={**_PARTS, "shared_memory": False}
        ),
        # It gives late workers an eighth of the deadline, three times at worst.
        "dist-broadcast": Subject(
            scheme="dist",
            group="process",
            options={**_PARTS, "topology": "broadcast"},
            timeout=6.0,
            deadline=4.0,
            collective=True,
        ),
        # Ray connects a worker to its raylet a second time once it needs to.
        "ray": Subject(
            scheme="ray", group="ray", shares=True, deadline=2.5, alone=True, late_connections=1
        ),
    }
)
