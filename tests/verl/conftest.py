"""One Ray for the tests in this folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray
from tests.verl.group import Cluster

# `make test-verl` runs these, in an environment with verl.
collect_ignore = ["upstream"]


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[Cluster]:
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
        object_store_memory=256 * 1024**2,
    )
    yield Cluster()
    ray.shutdown()


@pytest.fixture
def cluster(one_cluster: Cluster) -> Iterator[Cluster]:
    """Actors that no test uses yet."""
    yield one_cluster
    one_cluster.take_back()


@pytest.fixture(scope="module", autouse=True)
def ends_what_it_starts() -> None:
    """Check no file alone: Ray serves them all, and ends with the last of them."""
