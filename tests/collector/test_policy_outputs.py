"""Policies of observations that return more than an action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.collector.environments import ArrayCounting
from torch import nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv, GymEnv
from sync_collector.policies import PolicyError

pytestmark = pytest.mark.timeout(60)


class Pair(nn.Module):
    """Return the action and its log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, observation: torch.Tensor) -> Any:
        return self.scale * observation, -self.scale * observation.sum(-1)


class Dict(Pair):
    """Return a dict that has a value beside them."""

    def forward(self, observation: torch.Tensor) -> Any:
        action, log_prob = super().forward(observation)
        return {"action": action, "action_log_prob": log_prob, ("critic", "value"): action + 1}


@pytest.mark.parametrize("env", [ArrayCounting, CountingEnv], ids=["arrays", "tensordicts"])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("policy", [Pair(), Dict()], ids=["pair", "dict"])
def test_outputs_are_recorded(env: Callable[[], Any], number: int, policy: nn.Module) -> None:
    options: dict[str, Any] = {"num_workers_per_collector": number, "device": "cpu"}
    with Collector(env, policy, scheme="thread", frames_per_batch=6, **options) as collector:
        batch = next(collector)
    assert torch.equal(batch["action"], 2 * batch["observation"])
    assert torch.equal(batch["action_log_prob"], -2 * batch["observation"].sum(-1))
    assert (("critic", "value") in batch.keys(include_nested=True)) is isinstance(policy, Dict)
    if isinstance(policy, Dict):
        assert torch.equal(batch["critic", "value"], batch["action"] + 1)


def test_a_categorical_policy_without_tensordict_module() -> None:
    def policy(observation: torch.Tensor) -> Any:
        chosen = torch.distributions.Categorical(logits=observation[..., :2])
        action = chosen.sample()
        return action, chosen.log_prob(action)

    with Collector(
        lambda: GymEnv("CartPole-v1", num_envs=2, categorical=True),
        policy,
        scheme="thread",
        frames_per_batch=8,
    ) as collector:
        batch = next(collector)
    expected = batch["observation"][..., :2].log_softmax(-1)
    taken = expected.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(batch["action_log_prob"], taken)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"value": torch.zeros(1)}, "without the action"),
        ({"action": torch.zeros(1), "value": 1.0}, "a float for 'value'"),
        ({"action": torch.zeros(1), "observation": torch.zeros(1)}, "which the environment gives"),
        ((torch.zeros(1), None), "a NoneType for 'action_log_prob'"),
        ((torch.zeros(1),) * 3, r"returns \(action, log_prob\) or a dict"),
    ],
)
def test_outputs_that_cannot_be_recorded(made: Any, message: str) -> None:
    with (
        Collector(CountingEnv, lambda observation: made, scheme="none", frames_per_batch=2) as c,
        pytest.raises(PolicyError, match=message),
    ):
        next(c)
