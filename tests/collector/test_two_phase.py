"""Collectors whose workers commit a version together: a batch has one version."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tests.collector.processes import Pid

from sync_collector import Collector
from sync_collector.testing import Scale, long_episodes
from sync_core import SendError

pytestmark = pytest.mark.timeout(90)

OPTIONS: dict[str, Any] = {
    "scheme": "two_phase::shm",
    "workers": "process",
    "num_workers": 3,
    "frames_per_batch": 12,
    "sync": True,
}


def test_a_batch_has_one_version() -> None:
    policy = Scale()
    with Collector(
        long_episodes,
        policy,
        **OPTIONS,
        total_frames=96,
    ) as collector:
        for number, batch in enumerate(collector):
            assert batch["policy_version"].flatten().tolist() == [number // 2] * 12
            assert batch["action"].unique().tolist() == [float(number // 2)]
            if number in (1, 3, 5):
                policy.set(float(1 + number // 2))
                assert collector.update_policy_weights_().updated == (0, 1, 2)


@pytest.mark.long
def test_no_worker_acts_with_a_version_that_one_did_not_stage() -> None:
    policy = Scale()
    with Collector(
        Pid,
        policy,
        **OPTIONS,
        total_frames=-1,
        timeout=5.0,
    ) as collector:
        batches = iter(collector)
        next(batches)
        stopped = collector.cascade_execute("env.pid")[2]
        policy.set(1.0)
        os.kill(stopped, signal.SIGSTOP)
        try:
            with pytest.raises(SendError) as failure:
                collector.update_policy_weights_()
            assert failure.value.report.updated == ()
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert set(next(batches)["policy_version"].flatten().tolist()) == {0}
        assert collector.update_policy_weights_().updated == (0, 1, 2)
        assert set(next(batches)["policy_version"].flatten().tolist()) == {2}
