"""A collector gathers, refreshes, fails and ends alike on every worker group."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from sync_collector import Collector, CollectorStats
from sync_collector.envs import CountingEnv
from sync_collector.testing import CollectorConformance, Scale, long_episodes, values
from sync_core import (
    ClosedError,
    ModelError,
    OptionError,
    PluginNotFoundError,
    UnknownWorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_plugin_std import BFloat16
from sync_plugin_std.workers import ProcessGroup
from sync_testing import descendants

pytestmark = pytest.mark.timeout(60)


class Broken(CountingEnv):
    """Hangs, or kills its worker, in its fourth step."""

    def __init__(self, *, kill: bool = False, hang: float = 0.0) -> None:
        super().__init__(100)
        self._kill = kill
        self._hang = hang

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        if self._steps.item() == 3:
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self._hang)
        return super().step(tensordict)


@pytest.fixture(autouse=True)
def leaves_no_process() -> Iterator[None]:
    before = descendants()
    yield
    assert not descendants() - before


class TestInline(CollectorConformance):
    scheme = "thread"
    workers = "inline"

    def test_batches_are_made_when_they_are_wanted(self) -> None:
        policy = Scale()
        with self.collector(long_episodes, policy) as collector:
            for version in range(4):
                assert next(collector)["policy_version"].tolist() == [version] * 4
                collector.update_policy_weights_()
            assert collector.stats().lag == 0


class TestThread(CollectorConformance):
    scheme = "thread"
    workers = "thread"

    def test_a_late_batch_is_waited_for_again(self) -> None:
        def slow() -> CountingEnv:
            return Broken(hang=1.0)

        with self.collector(slow, frames_per_batch=4, num_workers=1, timeout=0.5) as collector:
            with pytest.raises(WorkerTimeoutError, match=r"worker 0: gave no batch within 0\.5 s"):
                next(collector)
            time.sleep(0.5)
            assert values(next(collector), "observation") == [0, 1, 2, 3]


class TestProcess(CollectorConformance):
    scheme = "shm"
    workers = "process"

    def test_a_worker_that_dies(self) -> None:
        envs = [long_episodes, lambda: Broken(kill=True)]
        with self.collector(envs, Scale(), frames_per_batch=8, sync=True) as collector:
            with pytest.raises(WorkerLostError, match="worker 1"):
                next(collector)
            assert not descendants()
            assert list(collector) == []

    def test_workers_draw_different_numbers_and_end_with_the_collector(self) -> None:
        collector = self.collector(long_episodes, sync=True)
        first, second = values(next(collector), "action")
        assert first != second
        assert len(descendants()) == 2
        del collector
        gc.collect()
        assert not descendants()


def test_the_trainers_own_policy_with_scheme_none() -> None:
    policy = Scale()
    with Collector(long_episodes, policy, scheme="none", frames_per_batch=2) as collector:
        policy.set(4.0)
        assert values(next(collector), "action") == [4.0] * 2
        assert collector.update_policy_weights_().updated == (0,)
        assert next(collector)["policy_version"].tolist() == [1, 1]
    with pytest.raises(OptionError, match="use scheme='shm', or workers='inline'"):
        Collector(long_episodes, policy, scheme="none", workers="process", frames_per_batch=2)


def test_a_scheme_that_cannot_reach_the_workers_of_a_group() -> None:
    class Elsewhere(ProcessGroup):
        capabilities = ProcessGroup.capabilities - {"descriptors"}

        def __init__(self, *args: Any, **options: Any) -> None:
            raise AssertionError("it was started")

    def make(scheme: Any, **several: Any) -> None:
        options: dict[str, Any] = {"frames_per_batch": 2, "workers": Elsewhere, **several}
        Collector(long_episodes, Scale(), scheme=scheme, **options)

    within = r"'thread' .* within a process, .* 'Elsewhere' .* scheme='shm', or workers='thread'"
    with pytest.raises(OptionError, match=within):
        make("thread")
    with pytest.raises(OptionError, match=within):
        make(None, weight_sync_schemes={"policy": "shm", "policy.weight": "thread"})
    with pytest.raises(OptionError, match=r"'mp' .* an open file, .* 'Elsewhere' .* scheme='dist'"):
        make("mp")
    with pytest.raises(AssertionError, match="it was started"):
        make("shm")


@pytest.mark.parametrize("policy", [None, nn.Identity(), lambda observation: observation + 1])
def test_a_policy_without_tensors_is_always_fresh(policy: Any) -> None:
    with Collector(long_episodes, policy, scheme="thread", frames_per_batch=2) as collector:
        assert collector.update_policy_weights_().updated == ()
        next(collector)
        assert collector.sender is None
        assert collector.stats() == CollectorStats(frames=2, batches=1)
        with pytest.raises(UnknownWorkerError):
            collector.update_policy_weights_(worker_ids=1)
        with pytest.raises(ModelError, match="nothing to load a Scale into"):
            collector.update_policy_weights_(Scale())


def test_environments_that_are_stepped_together() -> None:
    def pair() -> CountingEnv:
        return CountingEnv([2, 3], num_envs=2)

    options: dict[str, Any] = {
        "scheme": "thread",
        "num_workers": 2,
        "frames_per_batch": 12,
        "sync": True,
    }
    with Collector(pair, **options) as collector:
        batch = next(collector)
    assert batch.batch_size == torch.Size([2, 2, 3])
    assert batch.names == [None, None, "time"]
    assert values(batch, "observation") == [[[0, 1, 0], [0, 1, 2]]] * 2
    with (
        pytest.warns(UserWarning, match="worker 0 makes batches of 4 frames instead of 3") as told,
        Collector(pair, scheme="thread", frames_per_batch=3) as collector,
    ):
        assert next(collector).batch_size == torch.Size([2, 2])
    assert told[0].filename == __file__


def test_layers_and_options_reach_the_sender() -> None:
    options: dict[str, Any] = {"layers": [BFloat16("*weight")], "scheme_options": {"slots": 2}}
    policy = Scale()
    with Collector(
        long_episodes, policy, scheme="thread", frames_per_batch=2, sync=True, **options
    ) as collector:
        policy.set(1.001)
        collector.update_policy_weights_()
        assert values(next(collector), "action") == [[1.0, 1.0]]
    with pytest.raises(OptionError, match="colour"):
        Collector(
            long_episodes, policy, scheme="thread", frames_per_batch=2, scheme_options={"colour": 1}
        )


def test_without_versions_in_the_batches() -> None:
    options: dict[str, Any] = {
        "scheme": "thread",
        "frames_per_batch": 2,
        "track_policy_version": False,
    }
    with Collector(long_episodes, Scale(), **options) as collector:
        assert "policy_version" not in next(collector)


def test_workers_as_many_as_environments() -> None:
    options: dict[str, Any] = {"scheme": "none", "frames_per_batch": 2}
    with Collector([CountingEnv, CountingEnv, CountingEnv], **options) as collector:
        assert collector.worker_ids == (0, 1, 2)


@pytest.mark.parametrize("value", [True, 8.0, "8"])
@pytest.mark.parametrize(
    "name",
    [
        "frames_per_batch",
        "init_random_frames",
        "max_frames_per_traj",
        "max_weight_update_interval",
        "num_workers",
        "num_workers_per_collector",
        "total_frames",
    ],
)
def test_counts_that_are_no_integers(name: str, value: Any) -> None:
    options = {"frames_per_batch": 8, "scheme": "none", name: value}
    with pytest.raises(
        TypeError, match=f"^{name} is {value!r}, which is not an integer; give [01]"
    ):
        Collector(CountingEnv, **options)


def test_counts_of_numpy() -> None:
    two: Any = np.int64(2)
    with Collector(
        CountingEnv,
        scheme="none",
        frames_per_batch=4 * two,
        total_frames=8 * two,
        num_workers=two,
        num_workers_per_collector=two,
        max_frames_per_traj=two,
        init_random_frames=two,
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frames_per_batch": 21, "num_workers": 2, "sync": True}, ValueError, "for example 22"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch is 0"),
        ({"num_workers": 0}, ValueError, "num_workers is 0"),
        ({"total_frames": -2}, ValueError, "give 0 or more, or -1 for no end"),
        ({"create_env_fn": [CountingEnv], "num_workers": 2}, ValueError, "1 entries for 2 workers"),
        ({"create_env_fn": [CountingEnv()]}, TypeError, "create_env_fn=lambda"),
        ({"policy": Scale(), "policy_factory": Scale}, ValueError, "not both"),
        ({"scheme": "shmm"}, PluginNotFoundError, "did you mean 'shm'"),
        ({"workers": "proces"}, PluginNotFoundError, "did you mean 'process'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"create_env_fn": CountingEnv, "frames_per_batch": 2, "scheme": "none", **options}
    with pytest.raises(error, match=message):
        Collector(**options)


def test_bad_updates() -> None:
    with Collector(long_episodes, Scale(), scheme="thread", frames_per_batch=2) as collector:
        with pytest.raises(KeyError, match="no model 'critic'; the models are: 'policy'"):
            collector.update_policy_weights_(model_id="critic")
        with pytest.raises(ValueError, match="not several"):
            collector.update_policy_weights_(Scale(), weights={})
        with pytest.raises(UnknownWorkerError):
            collector.update_policy_weights_(worker_ids=[0, 5])
        assert collector.update_policy_weights_(model_id="policy").updated == (0,)
    collector.shutdown()
    with pytest.raises(ClosedError):
        collector.set_seed(0)


def test_a_collector_says_what_it_is() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "thread", "num_workers": 2}
    with Collector(CountingEnv, Scale(), frames_per_batch=4, **options) as made:
        next(made)
        assert repr(made) == "<Collector schemes=['shm'], workers=2, version=0, frames=4>"
