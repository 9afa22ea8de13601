"""One Ray for the tests in this folder: it starts once, and ends with the last of them."""

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


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Let no test elsewhere find the processes of Ray among its own."""
    if nextitem is None or "plugins_ray" not in nextitem.path.parts:
        ray.shutdown()
