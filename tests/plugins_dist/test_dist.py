"""The scheme `dist` does what every scheme does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from sync_core.testing import SchemeConformance
from sync_core.testing.schemes.delivery import DeliveryCases
from sync_core.testing.schemes.faults import FaultCases

pytestmark = pytest.mark.timeout(90)


class TestDist(SchemeConformance):
    scheme = "dist"


class TestDistBroadcast(DeliveryCases, FaultCases):
    scheme = "dist"
    options: ClassVar[Mapping[str, Any]] = {"topology": "broadcast"}
