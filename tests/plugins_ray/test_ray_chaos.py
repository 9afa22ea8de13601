"""A sample of the matrix of faults over Ray."""

from __future__ import annotations

import pytest
from chaos_kit import ChaosConformance

pytestmark = pytest.mark.long


class TestFaults(ChaosConformance):
    counts = {"ray": 5}
