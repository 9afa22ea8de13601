"""One Ray for all tests in this folder: it starts once, and ends with the session."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def one_ray() -> Iterator[None]:
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
        object_store_memory=512 * 1024**2,
    )
    yield
    ray.shutdown()
