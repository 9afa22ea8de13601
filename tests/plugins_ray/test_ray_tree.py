"""A collector in a Ray actor passes weights on to its own workers, which are processes."""

from __future__ import annotations

import sys

import cloudpickle  # type: ignore[import-untyped]
import pytest

from sync_collector import Collector
from sync_collector import testing as collectors
from sync_collector.testing import Scale, long_episodes
from sync_core import Sender
from sync_plugin_ray.group import RayGroup

pytestmark = pytest.mark.timeout(120)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(collectors)


def new_collector(worker_id: int) -> Collector:
    del worker_id
    return Collector(
        long_episodes,
        Scale(),
        scheme="shm",
        workers="process",
        num_workers=2,
        frames_per_batch=4,
        sync=True,
    )


def received(collector: Collector) -> tuple[dict[str, int], list[float]]:
    versions = dict(collector.receive_weights(timeout=30.0))
    return versions, collector.cascade_execute("policy.weight.item")


def test_weights_reach_processes_by_way_of_an_actor() -> None:
    with (
        Sender("shm", Scale(5.0), num_workers=1) as sender,
        RayGroup(new_collector, 1, timeout=60.0, remote_configs={"num_cpus": 1}) as group,
    ):
        address = sender.address(0)
        group.call(0, Collector.register_scheme_receiver, {"policy": address}).result(60)
        for version, weight in enumerate((5.0, 6.0), 1):
            pending = sender.send_async(Scale(weight))
            call = group.call(0, received)
            assert pending.wait().updated == (0,)
            assert call.result(60) == ({"policy": version}, [weight, weight])
