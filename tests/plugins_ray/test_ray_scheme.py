"""What every scheme does, of which Ray's part is in how versions arrive and how workers fail."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from sync_core.testing import CalledSchemeConformance
from sync_core.testing.schemes.delivery import DeliveryCases
from sync_core.testing.schemes.faults import FaultCases

pytestmark = pytest.mark.timeout(120)


class TestRay(DeliveryCases, FaultCases):
    scheme = "ray"


class TestCalledRay(CalledSchemeConformance):
    scheme = "ray"
    # The worker group's actor keeps there what it hosts.
    options = {"model_id": "_hosted.model"}

    @staticmethod
    def introduce(worker: Any) -> Any:
        return ray.get_runtime_context().current_actor
