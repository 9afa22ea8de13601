"""Updates of the weights that workers act with, by hand."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tests.collector.environments import Slow
from tests.collector.updates import Refuses, acted, collector

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.testing import Scale, long_episodes, values
from sync_core import (
    ApplyContext,
    PendingSend,
    SendError,
    SendReport,
    hookimpl,
)
from sync_testing.worker_groups import wait_for

pytestmark = pytest.mark.timeout(60)
THREAD: dict[str, Any] = {"scheme": "thread", "workers": "thread", "num_workers": 1}


@pytest.mark.parametrize(
    ("wrap", "given"),
    [
        (lambda p: p, {}),
        (lambda p: p.forward, {}),
        (functools.partial, {}),
        (lambda p: functools.partial(p.forward), {}),
        (lambda p: p, {"weights_dict": {"policy": Scale(5.0)}}),
        (lambda p: p, {"policy": Scale(5.0)}),
        (lambda p: p, {"model_id": "policy", "weights": {"weight": torch.tensor([5.0])}}),
    ],
)
def test_what_an_update_sends(wrap: Callable[[Scale], Any], given: dict[str, Any]) -> None:
    policy = Scale()
    with collector(wrap(policy), num_workers=1, sync=True) as made:
        policy.set(-1.0 if given else 5.0)
        assert made.update_policy_weights_(**given).updated == (0,)
        assert acted(next(made)) == [5.0]
        with pytest.raises(KeyError, match="no model 'critic'"):
            made.update_policy_weights_(weights_dict={"critic": Scale()})
        with pytest.raises(ValueError, match="leave out model_id"):
            made.update_policy_weights_(model_id="policy", weights_dict={"policy": Scale()})


def test_a_policy_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        policy = Scale(3.0)
    with collector(policy) as made:
        next(made)
        made.update_policy_weights_()
        assert acted(next(made)) == [3.0]


@pytest.mark.parametrize(("scheme", "workers"), [("thread", "thread"), ("shm", "process")])
def test_a_commit_in_the_middle_of_a_batch(scheme: str, workers: str) -> None:
    policy = Scale()
    options: dict[str, Any] = {"scheme": scheme, "workers": workers, "frames_per_batch": 25}
    with Collector(Slow, policy, num_workers=1, **options) as collector:
        next(collector)
        time.sleep(0.1)
        policy.set(1.0)
        report = collector.update_policy_weights_()
        assert collector._requests.busy(0)
        assert report.updated == (0,)
        batch = next(collector)
    versions = batch["policy_version"].tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert values(batch, "action") == versions


@pytest.mark.parametrize(("scheme", "workers"), [("thread", "thread"), ("shm", "process")])
def test_weights_that_come_with_the_last_step_of_a_batch(
    scheme: str, workers: str, tmp_path: Path
) -> None:
    steps, may_end = tmp_path / "steps", tmp_path / "may_end"

    class Waits(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            if self._steps.item() == 1:
                steps.touch()
                wait_for(may_end)
            return super().step(tensordict)

    options: dict[str, Any] = {"scheme": scheme, "workers": workers, "num_workers": 1}
    with Collector(lambda: Waits(100), Scale(), frames_per_batch=1, **options) as collector:
        next(collector)
        wait_for(steps)
        pending = collector.update_policy_weights_(blocking=False)
        assert isinstance(pending, PendingSend)
        may_end.touch()
        # No other batch is asked for, in which the worker would look for weights.
        assert pending.wait().updated == (0,)
        assert [next(collector)["policy_version"].item() for _ in range(2)] == [0, 1]


def test_a_sender_that_is_lost_costs_no_batch() -> None:
    with Collector(Slow, Scale(), frames_per_batch=25, **THREAD) as made:
        next(made)
        assert made.sender is not None
        made.sender.close()
        assert values(next(made), "observation") == list(range(25, 50))


@pytest.mark.parametrize("ends", [False, True])
def test_an_error_in_the_middle_of_a_batch(ends: bool) -> None:
    with Collector(Slow, Scale(), frames_per_batch=25, layers=[Refuses()], **THREAD) as made:
        next(made)
        time.sleep(0.1)
        with pytest.raises(SendError, match="not these"):
            made.update_policy_weights_()
        assert made._requests.busy(0), "the batch is not complete"
        while ends and made._requests.busy(0):
            time.sleep(0.01)
        # The error is not one of the next update.
        assert made.update_policy_weights_().updated == (0,)
        batch = next(made)
        assert values(batch, "observation") == list(range(25, 50))
        assert ends is False or batch["policy_version"].unique().tolist() == [0]
        assert next(made)["policy_version"].unique().tolist() == [2]


def test_updates_that_are_not_waited_for() -> None:
    policy = Scale()
    options: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 2}
    with Collector(Slow, policy, **options) as collector:
        pending = collector.update_policy_weights_(blocking=False)
        assert isinstance(pending, PendingSend)
        policy.set(2.0)
        collector.update_policy_weights_(blocking=False)
        assert collector.update_policy_weights_().updated == (0,)
        assert pending.wait().version == 1
        assert collector.stats().version == 3
        assert values(next(collector), "action") == [2.0] * 2


def test_collection_goes_on_while_an_update_is_under_way() -> None:
    committed = threading.Event()

    class HoldsUpOne:
        @hookimpl(wrapper=True)
        def apply_weights(self, context: ApplyContext) -> Any:
            if context.worker_id == 1:
                assert committed.wait(30)
            return (yield)

    policy = Scale()
    options: dict[str, Any] = {"scheme": "thread", "workers": "thread", "num_workers": 2}
    with Collector(
        Slow, policy, frames_per_batch=10, sync=False, layers=[HoldsUpOne()], **options
    ) as collector:
        next(collector)
        policy.set(1.0)
        pending = collector.update_policy_weights_(blocking=False)
        assert isinstance(pending, PendingSend)
        # One batch of each may have begun before; what comes then is of the worker that continues.
        batches = [next(collector) for _ in range(5)]
        assert not pending.done()
        assert {batch["policy_version"][0].item() for batch in batches[-2:]} == {1}
        committed.set()
        assert pending.wait().updated == (0, 1)


def test_versions_that_came_another_way() -> None:
    options: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 2, "sync": True}
    with Collector(long_episodes, Scale(), **options) as collector:
        assert collector.sender is not None
        assert collector.sender.collector is collector
        collector.sender.increment_version()
        assert next(collector)["policy_version"].unique().tolist() == [1]
        collector.update_policy_weights_()
        assert next(collector)["policy_version"].unique().tolist() == [2]
        assert collector.stats().lag == 0


def test_workers_that_join_get_the_newest_weights() -> None:
    policy = Scale()
    options: dict[str, Any] = {"scheme": "shm", "num_workers": 2, "frames_per_batch": 4}
    with Collector(long_episodes, policy, sync=True, **options) as collector:
        collector.increment_version()
        collector.update_policy_weights_(Scale(3.0))
        collector._pool.restart(0)
        collector._pool.add()
        batch = next(collector)
        assert values(batch, "action") == [[3.0] * 2] * 3
        assert batch["policy_version"].unique().tolist() == [2]
        report = collector.update_policy_weights_()
        assert isinstance(report, SendReport)
        assert report.updated == (0, 1, 2)


def test_an_update_does_not_hang_on_a_worker_that_dies() -> None:
    def fatal() -> CountingEnv:
        class Fatal(Slow):
            def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
                if self._steps.item() == 5:
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().step(tensordict)

        return Fatal()

    options: dict[str, Any] = {"scheme": "shm", "frames_per_batch": 4}
    with Collector(fatal, Scale(), num_workers=1, **options) as collector:
        next(collector)
        time.sleep(0.2)
        began = time.perf_counter()
        with pytest.raises(Exception, match="worker 0"):
            collector.update_policy_weights_()
        assert time.perf_counter() - began < 10
