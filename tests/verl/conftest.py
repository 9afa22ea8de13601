"""One Ray for the tests of a file: the one that other tests have started, or its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray
from tests.verl.group import Cluster

# `make test-verl` runs these, in an environment with verl.
collect_ignore = ["upstream"]


@pytest.fixture(scope="module")
def one_cluster() -> Iterator[Cluster]:
    ours = not ray.is_initialized()
    if ours:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
            object_store_memory=256 * 1024**2,
        )
    yield Cluster()
    if ours:
        ray.shutdown()


@pytest.fixture
def cluster(one_cluster: Cluster) -> Iterator[Cluster]:
    """Actors that no test uses yet."""
    yield one_cluster
    one_cluster.take_back()


@pytest.fixture(scope="module", autouse=True)
def ends_what_it_starts() -> None:
    """Check no file alone: Ray may serve those of other folders, and end with them."""
