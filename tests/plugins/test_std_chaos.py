"""A sample of the matrix of faults over the standard schemes."""

from __future__ import annotations

from sync_core.testing.chaos import ChaosConformance


class TestFaults(ChaosConformance):
    counts = {"thread": 8, "shm": 8, "mp": 4}
