"""`Collector.evaluate`: episodes with the trainer's policy, apart from collection."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_core import ClosedError, LayoutMismatchError

pytestmark = pytest.mark.timeout(60)


class Policy(nn.Module):
    """Acts with its weight, and adds noise unless acting is deterministic."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        action = self.weight.expand(observation.shape)
        noise = 0.0 if interaction_type() is InteractionType.DETERMINISTIC else 1000.0
        return action + noise * torch.rand_like(action)


class Paid(CountingEnv):
    """Gives the action as the reward, and notes when it was closed."""

    closed: list[Any] = []

    def close(self) -> None:
        self.closed.append(self)


def make(policy: Any = None, **options: Any) -> Collector:
    given: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 4, **options}
    return Collector(lambda: Paid(4), policy, timeout=20.0, **given)


class Whole(nn.Module):
    """Acts with itself and a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.rest = Policy(), Policy()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return 10 * self.part.forward(observation) + self.rest.forward(observation)


@pytest.mark.parametrize("names", [["policy.part"], ["policy", "policy.part"], ["policy"]])
def test_the_whole_policy_is_evaluated_where_a_part_of_it_is_sent(names: list[str]) -> None:
    policy = Whole()
    schemes = dict.fromkeys(names, "thread")
    with make(policy, scheme=None, weight_sync_schemes=schemes) as collector:
        assert collector.evaluate(1).rewards == (0.0,)
        with torch.no_grad():
            policy.part.weight.fill_(1.0)
            policy.rest.weight.fill_(2.0)
        assert collector.evaluate(1).rewards == (4 * 12.0,)


@pytest.mark.parametrize("act", [lambda net: net, lambda net: net.forward, functools.partial])
def test_a_policy_that_workers_share_is_evaluated_as_it_is_now(act: Any) -> None:
    policy = Policy()
    with make(act(policy), scheme="none") as collector:
        assert collector.evaluate(1).rewards == (0.0,)
        with torch.no_grad():
            policy.weight.fill_(2.0)
        assert collector.evaluate(1).rewards == (8.0,)


class Number(nn.Module):
    """Has a plain number beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1.0


class Moody(Policy):
    """Acts with the mode and the number of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Number()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        mode = 100.0 if self.inner.training else 0.0
        return (self.weight + mode + self.inner.number).expand(observation.shape)


def test_modes_and_numbers_of_the_policy_are_as_they_are_now() -> None:
    policy = Moody()
    with make(policy) as collector:
        assert collector.evaluate(1).rewards == (4 * 101.0,)
        policy.eval()
        policy.inner.number = 2.0
        assert collector.evaluate(1).rewards == (4 * 2.0,)
        policy.train()
        assert collector.evaluate(1).rewards == (4 * 102.0,)


def test_episodes_are_new_ones_without_a_seed_and_the_same_with_one() -> None:
    with make(Policy(), scheme="none") as collector:
        results = [collector.evaluate(2, deterministic=False).rewards for _ in range(3)]
        assert len(set(results)) == 3
        results = []
        for _ in range(2):
            results.append(collector.evaluate(2, deterministic=False, seed=3).rewards)
            # Numbers that the trainer draws change nothing, nor does another evaluation.
            torch.rand(1)
            collector.evaluate(2, deterministic=False)
        assert results[0] == results[1]
        state = torch.get_rng_state()
        collector.evaluate(2, deterministic=False)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("scheme", ["none", "thread", "shm"])
def test_the_trainers_policy_as_it_is_now(scheme: str) -> None:
    policy = Policy(1.0)
    with make(policy, scheme=scheme) as collector:
        assert collector.evaluate(3).rewards == (4.0,) * 3
        assert next(collector).numel() == 4
        with torch.no_grad():
            policy.weight.fill_(2.0)
        result = collector.evaluate(3)
        assert (result.mean_reward, result.std_reward, result.mean_length) == (8.0, 0.0, 4.0)
        assert collector.evaluate(1, deterministic=False).mean_reward > 100
        assert collector.stats().frames == 4


def test_collection_is_not_disturbed() -> None:
    def batches(*, evaluated: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with make(Policy(), scheme="thread", workers="inline") as collector:
            collector.set_seed(0)
            made = []
            for _ in range(3):
                made.append(next(collector)["action"])
                if evaluated:
                    collector.evaluate(2, deterministic=False)
            return made

    for plain, evaluated in zip(batches(evaluated=False), batches(evaluated=True), strict=True):
        assert torch.equal(plain, evaluated)


def test_environments_stepped_together_have_their_share() -> None:
    def uneven() -> CountingEnv:
        return CountingEnv([1, 8], num_envs=2)

    with Collector(uneven, scheme="none", frames_per_batch=4) as collector:
        assert sorted(collector.evaluate(4).lengths) == [1, 1, 8, 8]
        assert sorted(collector.evaluate(3).lengths) == [1, 1, 8]


def test_weights_of_another_model_and_of_workers() -> None:
    with make(policy_factory=lambda: Policy(3.0)) as collector:
        assert collector.evaluate(1).rewards == (12.0,)
        collector.update_policy_weights_(Policy(5.0))
        assert collector.evaluate(1).rewards == (20.0,)
        policy = Policy(7.0)
        for given in (policy, policy.state_dict(), TensorDict.from_module(policy)):
            assert collector.evaluate(1, weights=given).rewards == (28.0,)
        assert collector.evaluate(1).rewards == (20.0,)
        with pytest.raises(LayoutMismatchError):
            collector.evaluate(1, weights=nn.Linear(2, 2))


def test_its_environment_is_closed_with_the_collector() -> None:
    Paid.closed.clear()
    with make(Policy(), workers="inline") as collector:
        collector.evaluate(1)
        collector.evaluate(1)
        assert Paid.closed == []
    assert len(Paid.closed) == 2
    with pytest.raises(ClosedError):
        collector.evaluate(1)


@pytest.mark.parametrize("scheme", ["none", "thread", "shm"])
def test_after_the_last_batch(scheme: str) -> None:
    Paid.closed.clear()
    policy = Policy(1.0)
    with make(policy, scheme=scheme, workers="inline", total_frames=8) as collector:
        assert len(list(collector)) == 2
        ended = len(Paid.closed)
        with torch.no_grad():
            policy.weight.fill_(2.0)
        assert collector.evaluate(3).rewards == (8.0,) * 3
        assert collector.evaluate(1, weights=Policy(3.0)).rewards == (12.0,)
        assert len(Paid.closed) == ended + 2, "nothing else closes these environments"
    assert collector.evaluate(1).rewards == (8.0,)


def test_policies_that_the_workers_made_end_with_them() -> None:
    with make(policy_factory=lambda: Policy(3.0), total_frames=4) as collector:
        list(collector)
        with pytest.raises(ClosedError, match="weights="):
            collector.evaluate(1)
        assert collector.evaluate(1, weights=Policy(5.0)).rewards == (20.0,)


def test_episodes_that_do_not_end() -> None:
    with (
        Collector(lambda: CountingEnv(10**9), scheme="none", frames_per_batch=4) as collector,
        pytest.raises(TimeoutError, match=r"0 of 2 episodes .* max_frames_per_traj"),
    ):
        collector.evaluate(2, timeout=0.05)


def test_workers_in_threads_explore_meanwhile_and_evaluation_does_not() -> None:
    with make(Policy(), num_workers=3, frames_per_batch=40) as collector:
        for _ in range(10):
            batch = next(collector)
            assert (batch["action"] != 0).all()
            assert collector.evaluate(2).rewards == (0.0, 0.0)
        assert collector.stats().frames == 400
