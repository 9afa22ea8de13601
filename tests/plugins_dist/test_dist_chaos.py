"""A sample of the matrix of faults over torch.distributed."""

from __future__ import annotations

from sync_core.testing.chaos import ChaosConformance


class TestFaults(ChaosConformance):
    counts = {"dist": 5, "dist-broadcast": 4, "rpc": 2}
