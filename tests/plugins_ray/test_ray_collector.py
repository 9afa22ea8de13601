"""A collector whose workers are Ray actors: what every group does, and a buffer in an actor."""

from __future__ import annotations

import sys
import time
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import ray

from sync_core import Collector
from sync_core.testing import CollectorConformance, collectors
from sync_core.testing.collectors import FrameList, Scale, long_episodes

pytestmark = pytest.mark.timeout(120)

# Actors cannot import this file by name; the other they can, with pytest, which takes seconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(collectors)


class TestRay(CollectorConformance):
    scheme = "ray"
    workers = "ray"
    worker_options = {"remote_configs": {"num_cpus": 1}}


class InAnActor:
    """A replay buffer that is the same one wherever it travels."""

    def __init__(self) -> None:
        self.actor: Any = ray.remote(num_cpus=0)(FrameList).remote()

    def extend(self, batch: Any) -> None:
        ray.get(self.actor.extend.remote(batch))

    def frames(self) -> int:
        return int(ray.get(self.actor.frames.remote()))


def test_actors_write_to_a_replay_buffer_in_an_actor() -> None:
    buffer = InAnActor()
    with Collector(
        long_episodes,
        Scale(),
        scheme="ray",
        worker_options={"remote_configs": {"num_cpus": 1}},
        num_workers=1,
        frames_per_batch=4,
        replay_buffer=buffer,
        extend_in_workers=True,
    ) as collector:
        assert next(collector) is None
        collector.start()
        collector.update_policy_weights_()
        while buffer.frames() < 40:
            time.sleep(0.02)
        with collector.pause():
            assert collector.stats().frames == buffer.frames()
