"""Chains over `ray` pass the suite, as those of `test_compositions.py` do."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray

from sync_plugin_scale import Chunked, Increments
from sync_testing.schemes import DeliveryCases, FaultCases, ValueCases

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True, scope="module")
def one_ray(ends_what_it_starts: None) -> Iterator[None]:
    del ends_what_it_starts
    ray.init(
        num_cpus=8, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False
    )
    yield
    ray.shutdown()


class Cases(DeliveryCases, ValueCases, FaultCases):
    """The cases that `ray` itself runs, and all values."""


class TestIncrementsOverRay(Cases):
    scheme = Increments("ray")


class TestChunkedOverRay(Cases):
    scheme = Chunked("ray", mb=0.5)


class TestIncrementsInChunksOverRay(Cases):
    scheme = Increments(Chunked("ray", mb=0.5))
