"""Faults for tests of any scheme: processes that are killed or stopped, versions that are lost.

A fault happens at a named point of one version's delivery, in the process that it is for. Nothing
is patched: `Faulty` is a scheme that wraps another. See ``docs/authors/faults.md``.
"""

from sync_testing.faults.fault import POINTS, Fault, InjectedFaultError, Raising
from sync_testing.faults.process import (
    execute,
    few_descriptors,
    fork,
    full,
    kill,
    small_files,
    stop,
)
from sync_testing.faults.transport import Faulty

__all__ = [
    "POINTS",
    "Fault",
    "Faulty",
    "InjectedFaultError",
    "Raising",
    "execute",
    "few_descriptors",
    "fork",
    "full",
    "kill",
    "small_files",
    "stop",
]
