"""The scheme `dist` does what every scheme does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from sync_testing import SchemeConformance
from sync_testing.schemes import DeliveryCases, FaultCases, IncrementCases

pytestmark = pytest.mark.timeout(90)


class TestDist(DeliveryCases, FaultCases):
    """Workers of this machine, as those of `rpc` in all other cases."""

    scheme = "dist"


class TestDistOverGloo(SchemeConformance):
    """Workers as on another machine."""

    scheme = "dist"
    options: ClassVar[Mapping[str, Any]] = {"shared_memory": False}


class TestDistBroadcast(DeliveryCases, IncrementCases):
    scheme = "dist"
    # An eighth of it is how long the others wait for a worker that is late.
    options: ClassVar[Mapping[str, Any]] = {"topology": "broadcast", "timeout": 24.0}


@pytest.mark.long
class TestDistBroadcastFaults(FaultCases):
    scheme = "dist"
    options = TestDistBroadcast.options
