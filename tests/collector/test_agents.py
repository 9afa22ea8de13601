"""Environments of several agents that act at once, and pools of environments."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from tensordict import TensorDictBase

from sync_collector import BatchOptions, Collector
from sync_collector.envs.adapt import as_env
from sync_collector.envs.gym import EnvOptions
from sync_core import RemoteCallError

pytestmark = pytest.mark.timeout(60)

SHORT, LONG = 2, 4


class Pair:
    """Two agents that count their steps; the first leaves before the second is cut short."""

    possible_agents: ClassVar[list[str]] = ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        seen = Box(0, 100, (1,), np.float32)
        return seen if agent == "a" else Dict(seen=seen, mask=MultiBinary(3))

    def action_space(self, agent: str) -> Any:
        return Discrete(2) if agent == "a" else Discrete(3)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        del seed, options
        self.agents, self.count = list(self.possible_agents), 0
        return self._seen(), self._infos()

    def step(self, actions: Any) -> Any:
        assert set(actions) == set(self.agents)
        self.count += 1
        present = list(self.agents)
        self.agents = [agent for agent in present if self.count < (SHORT if agent == "a" else LONG)]
        if self.count == LONG:
            self.agents = []
        gone = {agent: agent not in self.agents for agent in present}
        return (
            {agent: value for agent, value in self._seen().items() if agent in present},
            {agent: float(actions[agent]) for agent in present},
            {agent: gone[agent] and agent == "a" for agent in present},
            {agent: gone[agent] and agent == "b" for agent in present},
            self._infos(),
        )

    def _seen(self) -> dict[str, Any]:
        seen = np.full(1, self.count, np.float32)
        return {"a": seen, "b": {"seen": seen, "mask": np.array([0, 1, 0], np.int8)}}

    def _infos(self) -> dict[str, Any]:
        return {agent: {"twice": 2 * self.count} for agent in self.agents}


def ones(tensordict: TensorDictBase) -> TensorDictBase:
    for agent in ("a", "b"):
        tensordict[agent, "action"] = torch.tensor(1)
    return tensordict


@pytest.mark.parametrize("scheme", ["none", "shm"])
def test_agents_that_leave_one_after_the_other(scheme: str) -> None:
    options = BatchOptions(episode_stats=True)
    with Collector(Pair, ones, scheme=scheme, frames_per_batch=8, batch=options) as collector:
        batch = next(collector)
        stats = collector.stats()
    assert batch["a", "observation"].flatten().tolist() == [0, 1, 2, 0] * 2
    assert batch["next", "b", "seen"].flatten().tolist() == [1, 2, 3, 4] * 2
    assert batch["next", "a", "reward"].flatten().tolist() == [1, 1, 0, 0] * 2
    assert batch["next", "a", "terminated"].flatten().tolist() == [False, True, True, True] * 2
    assert batch["a", "done"].flatten().tolist() == [False, False, True, True] * 2
    assert batch["next", "b", "truncated"].flatten().tolist() == [False, False, False, True] * 2
    assert batch["next", "done"].flatten().tolist() == [False, False, False, True] * 2
    assert batch["next", "truncated"].flatten().tolist() == [False, False, False, True] * 2
    assert not batch["next", "terminated"].any()
    assert stats.episodes == 2
    # The mean over agents, of 2 and 4.
    assert stats.episode_reward == pytest.approx(3.0)


def test_random_agents_are_seeded_and_have_masks() -> None:
    def make() -> Any:
        options = EnvOptions(categorical=True, info_keys={"twice": "int64"})
        return as_env(Pair(), options)

    with Collector(make, None, scheme="none", frames_per_batch=40) as collector:
        collector.set_seed(1)
        first = next(collector)
        collector.set_seed(1)
        again = next(collector)
    assert (first["a", "action"] == again["a", "action"]).all()
    assert 0 < first["a", "action"].float().mean() < 1
    assert first["next", "b", "twice"].flatten().tolist()[:4] == [2, 4, 6, 0]


def test_agents_that_take_turns_or_lack_a_mask() -> None:
    class Turns(Pair):
        def agent_iter(self) -> Any:
            raise NotImplementedError

    with pytest.raises(TypeError, match="aec_to_parallel"):
        as_env(Turns())
    with pytest.raises(RemoteCallError, match=r"neither in the observation nor in info"):
        Collector(Pair, None, scheme="none", frames_per_batch=4, action_mask="mask").__next__()


class Pool:
    """Three environments that count, stepped as EnvPool steps them."""

    observation_space = Box(0, 100, (1,), np.float32)
    action_space = Discrete(2)
    all_env_ids = np.arange(3)

    def __init__(self, batch_size: int = 3) -> None:
        self.config = {"num_envs": 3, "batch_size": batch_size}
        self._limits = np.array([2, 3, 100])

    def reset(self, env_id: Any = None) -> Any:
        if env_id is None:
            env_id, self._steps = self.all_env_ids, np.zeros(3, np.float32)
        self._steps[env_id] = 0
        return self._steps[env_id, None].copy(), {"env_id": env_id}

    def step(self, action: Any) -> Any:
        over = self._steps >= self._limits
        assert not over.any(), "an environment was to be reset by its number"
        self._steps += 1
        over = self._steps >= self._limits
        reward = action.astype(np.float32)
        return self._steps[:, None].copy(), reward, over, over & False, {}

    def close(self) -> None:
        self._steps = np.zeros(0, np.float32)


def test_a_pool_that_resets_by_numbers() -> None:
    def left(observation: torch.Tensor) -> torch.Tensor:
        return torch.ones(3, dtype=torch.int64)

    with Collector(Pool, left, scheme="none", frames_per_batch=18) as collector:
        batch = next(collector)
        with pytest.raises(RemoteCallError, match=r"envpool.make_gymnasium\(…, seed=0\)"):
            collector.set_seed(0)
    seen = batch["next", "observation"].squeeze(-1).tolist()
    assert seen == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert (batch["next", "reward"] == 1).all()
    with pytest.raises(TypeError, match="make it without batch_size"):
        as_env(Pool(2))
