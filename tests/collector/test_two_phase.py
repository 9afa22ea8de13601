"""Collectors whose workers commit a version together: a batch has one version."""

from __future__ import annotations

import pytest

from sync_collector import Collector
from sync_collector.testing import Scale, long_episodes

pytestmark = pytest.mark.timeout(90)


def test_a_batch_has_one_version() -> None:
    policy = Scale()
    with Collector(
        long_episodes,
        policy,
        scheme="two_phase::shm",
        workers="process",
        num_workers=3,
        frames_per_batch=12,
        total_frames=96,
        sync=True,
    ) as collector:
        for number, batch in enumerate(collector):
            assert batch["policy_version"].flatten().tolist() == [number // 2] * 12
            assert batch["action"].unique().tolist() == [float(number // 2)]
            if number in (1, 3, 5):
                policy.set(float(1 + number // 2))
                assert collector.update_policy_weights_().updated == (0, 1, 2)
