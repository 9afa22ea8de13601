"""Faults for tests, on any scheme: processes that die or stand still, versions that are lost.

A fault strikes at a named point on the way of one version, in the process whose fault it is, with
nothing patched: `Faulty` is a scheme around a scheme. See ``docs/authors/faults.md``.
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
