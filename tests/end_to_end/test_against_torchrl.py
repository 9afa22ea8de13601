"""Our collector gathers what TorchRL's gathers in one environment of TorchRL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl import collectors, envs

from sync_collector import Collector

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("env_id", "sizes", "split_trajs"),
    [("Pendulum-v1", (3, 1), False), ("CartPole-v1", (4, 2), False), ("CartPole-v1", (4, 2), True)],
)
def test_batches_equal_key_by_key(env_id: str, sizes: tuple[int, int], split_trajs: bool) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(*sizes), OneHot() if sizes[1] > 1 else nn.Tanh()]
    policy = TensorDictModule(nn.Sequential(*layers), ["observation"], ["action"])

    def make_env() -> Any:
        env = envs.GymEnv(env_id)
        env.set_seed(7)
        return env

    options: dict[str, Any] = {
        "frames_per_batch": 60,
        "total_frames": 180,
        "split_trajs": split_trajs,
    }
    theirs = collectors.Collector(make_env, policy, **options)
    ours = Collector(
        make_env,
        policy,
        scheme="thread",
        workers="inline",
        track_policy_version=False,
        **options,
    )
    try:
        for mine, their in zip(ours, theirs, strict=True):
            assert mine.batch_size == their.batch_size
            assert mine.names == their.names
            keys = set(their.keys(include_nested=True, leaves_only=True))
            assert set(mine.keys(include_nested=True, leaves_only=True)) == keys
            for key in keys:
                assert mine[key].dtype == their[key].dtype, key
                assert torch.equal(mine[key], their[key]), key
    finally:
        theirs.shutdown()
        ours.shutdown()


class OneHot(nn.Module):
    """Return the largest value as a one-hot vector."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
