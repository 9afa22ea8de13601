"""TorchRL's collector over Ray, with the scheme `ray`."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.distributed import RayCollector
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

from sync_plugin_torchrl import Scheme

pytestmark = pytest.mark.long


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
def test_actors_act_with_what_was_sent() -> None:
    linear = nn.Linear(7, 7)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, 1.0)
    policy = TensorDictModule(linear, ["observation"], ["action"])
    collector = RayCollector(
        [ContinuousActionVecMockEnv] * 2,
        policy,
        frames_per_batch=20,
        total_frames=60,
        sync=True,
        remote_configs={"num_cpus": 1, "num_gpus": 0, "memory": 10**8},
        weight_sync_schemes={"policy": Scheme("ray")},
    )
    seen = []
    try:
        for value, batch in enumerate(collector, 2):
            seen.append(batch["action"].unique().tolist())
            with torch.no_grad():
                linear.bias.fill_(float(value))
            collector.update_policy_weights_()
    finally:
        collector.shutdown(shutdown_ray=False)
    assert seen == [[1.0], [2.0], [3.0]]
