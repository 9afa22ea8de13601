"""Conformance of the scheme `ray`."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from sync_testing import CalledSchemeConformance
from sync_testing.schemes import DeliveryCases, FaultCases, IncrementCases, LifetimeCases

pytestmark = pytest.mark.timeout(120)


class TestRay(DeliveryCases, IncrementCases):
    scheme = "ray"
    # The mailbox is what a receiver waits for.
    test_closing_a_receiver_wakes_a_thread_that_waits_in_it = (
        LifetimeCases.test_closing_a_receiver_wakes_a_thread_that_waits_in_it
    )


@pytest.mark.long
class TestRayFaults(FaultCases):
    scheme = "ray"


class TestCalledRay(CalledSchemeConformance):
    scheme = "ray"
    # The worker group's actor keeps there what it hosts.
    options = {"model_id": "_hosted.model"}

    @staticmethod
    def introduce(worker: Any) -> Any:
        return ray.get_runtime_context().current_actor
