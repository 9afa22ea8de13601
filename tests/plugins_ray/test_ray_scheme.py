"""What every scheme does, of which Ray's part is in how versions arrive and how workers fail."""

from __future__ import annotations

import pytest

from sync_core.testing.schemes.delivery import DeliveryCases
from sync_core.testing.schemes.faults import FaultCases

pytestmark = pytest.mark.timeout(120)


class TestRay(DeliveryCases, FaultCases):
    scheme = "ray"
