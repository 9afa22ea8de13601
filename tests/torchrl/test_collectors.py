"""TorchRL's collectors with schemes of sync-core in place of their own.

What TorchRL's own tests of its schemes assert about collectors is asserted here, but that a step is
seen by workers before it is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

from sync_plugin_torchrl import Scheme

pytestmark = [pytest.mark.long, pytest.mark.timeout(110), pytest.mark.filterwarnings("ignore")]

# Worker processes cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make_policy(value: float = 0.0) -> TensorDictModule:
    """Return a policy whose actions are all ``value``."""
    layers = nn.Sequential(nn.LazyLinear(7), nn.Linear(7, 7))
    policy = TensorDictModule(layers, ["observation"], ["action"])
    policy(ContinuousActionVecMockEnv().reset())
    fill(policy, value)
    return policy


def fill(policy: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        policy.get_parameter("module.1.bias").fill_(value)


@contextmanager
def shut_down(collector: Any) -> Iterator[Any]:
    try:
        yield collector
    finally:
        collector.shutdown()


def in_workers(collector: Any) -> list[float]:
    """Return the value that each worker's policy acts with."""
    states: Mapping[str, Any] = collector.state_dict()
    policies = [states[f"worker{i}"]["policy_state_dict"] for i in range(2)]
    return [float(policy["module.1.bias"].unique()) for policy in policies]


def actions(batch: Any) -> list[float]:
    values: Tensor = batch["action"].unique()
    return values.tolist()


@pytest.mark.parametrize(
    ("kind", "name"), [(MultiSyncCollector, "shm"), (MultiAsyncCollector, "mp")]
)
def test_updates_reach_every_worker(kind: Any, name: str) -> None:
    policy = make_policy(1.0)
    collector = kind(
        [ContinuousActionVecMockEnv] * 2,
        policy,
        frames_per_batch=20,
        total_frames=-1,
        weight_sync_schemes={"policy": Scheme(name), "policy.module.1": Scheme(name)},
        track_policy_version=True,
        **({"cat_results": "stack"} if kind is MultiSyncCollector else {}),
    )
    with shut_down(collector):
        # Before the first batch: a worker that is asked for its state while it collects drops its
        # batch, so that a MultiAsyncCollector may wait for ever.
        fill(policy, 2.0)
        assert in_workers(collector) == [1.0, 1.0]
        collector.update_policy_weights_()
        assert in_workers(collector) == [2.0, 2.0]
        collector.update_policy_weights_(make_policy(3.0).state_dict(), worker_ids=1)
        assert in_workers(collector) == [2.0, 3.0]
        head = nn.Linear(7, 7)
        nn.init.constant_(head.weight, 0.0)
        nn.init.constant_(head.bias, 5.0)
        collector.update_policy_weights_(
            weights_dict={"policy": make_policy(4.0), "policy.module.1": head}
        )
        assert in_workers(collector) == [5.0, 5.0]
        batches = iter(collector)
        batch = next(batches)
        assert actions(batch) == [5.0]
        assert int(batch["policy_version"].max()) in {2, 3}  # by worker
        collector.update_policy_weights_(make_policy(6.0))
        seen = [actions(next(batches)) for _ in range(6)]
        assert seen[-1] == [6.0]


def test_each_worker_with_the_policy_of_its_factory() -> None:
    collector = MultiSyncCollector(
        [ContinuousActionVecMockEnv] * 2,
        policy_factory=[partial(make_policy, 1.0), partial(make_policy, 2.0)],
        frames_per_batch=20,
        total_frames=-1,
        cat_results="stack",
        weight_sync_schemes={"policy": Scheme("shm")},
    )
    with shut_down(collector):
        batch = next(iter(collector))
        assert [actions(part) for part in batch] == [[1.0], [2.0]]
        collector.update_policy_weights_({0: make_policy(3.0), 1: make_policy(4.0).state_dict()})
        assert in_workers(collector) == [3.0, 4.0]
        collector.update_policy_weights_(make_policy(5.0))
        assert in_workers(collector) == [5.0, 5.0]


def test_processes_of_a_distributed_collector() -> None:
    policy = make_policy(1.0)
    collector = DistributedCollector(
        [ContinuousActionVecMockEnv] * 2,
        policy,
        frames_per_batch=20,
        total_frames=60,
        sync=True,
        launcher="mp",
        backend="gloo",
        weight_sync_schemes={"policy": Scheme("dist")},
    )
    seen = []
    with shut_down(collector):
        for value, batch in enumerate(collector, 2):
            seen.append(actions(batch))
            fill(policy, float(value))
            collector.update_policy_weights_()
    assert seen == [[1.0], [2.0], [3.0]]
