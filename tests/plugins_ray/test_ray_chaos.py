"""A sample of the matrix of faults over Ray."""

from __future__ import annotations

from chaos_kit import ChaosConformance


class TestFaults(ChaosConformance):
    counts = {"ray": 5}
