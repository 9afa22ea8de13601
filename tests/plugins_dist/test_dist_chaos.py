"""A sample of the matrix of faults over torch.distributed."""

from __future__ import annotations

import pytest
from chaos_kit import ChaosConformance

pytestmark = pytest.mark.long


class TestFaults(ChaosConformance):
    counts = {"dist": 2, "dist-gloo": 4, "dist-broadcast": 4}
