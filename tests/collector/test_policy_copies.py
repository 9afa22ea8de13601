"""Copies of a policy in workers: they hear of commits, have parts, and no wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.testing import Scale

pytestmark = pytest.mark.timeout(90)


class Caching(nn.Module):
    """Keeps what it has computed from its weights until a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(1, 1), nn.Linear(1, 1)
        self.on_commit(0)

    def on_commit(self, version: int) -> None:
        self.kept: torch.Tensor | None = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.head.weight.detach().clone()
        return self.kept.reshape(1).expand(*observation.shape[:-1], 1)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_a_policy_hears_of_commits(scheme: str, parts: bool) -> None:
    policy = Caching()
    schemes = {"policy": scheme, "policy.head": scheme}
    options: dict[str, Any] = {"weight_sync_schemes": schemes} if parts else {"scheme": scheme}
    with Collector(
        CountingEnv, policy, num_workers=1, frames_per_batch=4, sync=True, **options
    ) as made:
        next(made)
        for value in (1.0, 2.0):
            nn.init.constant_(policy.head.weight, value)
            name = "policy.head" if parts else "policy"
            assert made.update_policy_weights_(model_id=name).version == value
            assert next(made)["action"].unique().tolist() == [value]
        (added,) = made.add_workers()
        assert next(made)["action"].unique().tolist() == [2.0]
        assert added == 1


def test_a_part_of_the_policy_is_updated_alone() -> None:
    policy = Caching()
    schemes = {"policy": "thread", "policy.other": "thread"}
    with Collector(
        CountingEnv, policy, weight_sync_schemes=schemes, frames_per_batch=4, sync=True
    ) as made:
        before = policy.head.weight.item()
        nn.init.constant_(policy.head.weight, 7.0)
        nn.init.constant_(policy.other.weight, 5.0)
        made.update_policy_weights_(model_id="policy.other")
        assert made.cascade_execute("policy.other.weight.item") == [5.0]
        assert made.cascade_execute("policy.head.weight.item") == [before]
        made.add_workers()
        assert made.cascade_execute("policy.other.weight.item") == [5.0, 5.0]
        assert made.cascade_execute("policy.head.weight.item") == [before, before]
        made.update_policy_weights_()
        assert made.cascade_execute("policy.head.weight.item") == [7.0, 7.0]


def test_a_wrapped_policy_is_the_module_inside() -> None:
    policy = Scale()
    with Collector(
        CountingEnv, nn.DataParallel(policy), scheme="shm", frames_per_batch=4, sync=True
    ) as made:
        next(made)
        nn.init.constant_(policy.weight, 3.0)
        made.update_policy_weights_(nn.DataParallel(policy))
        assert next(made)["action"].unique().tolist() == [3.0]
