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
@pytest.mark.long
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


def step_of(**changed: Any) -> Any:
    """Return a method `step` that gives something else in place of what `Pair` gives."""
    names = ("observations", "rewards", "terminated", "truncated", "infos")

    def step(self: Any, actions: Any) -> Any:
        given = dict(zip(names, Pair.step(self, actions), strict=True)) | changed
        return tuple(given[name] for name in names if name in given)

    return step


def starting_with(agents: Any) -> Any:
    def reset(self: Any, seed: Any = None, options: Any = None) -> Any:
        made = Pair.reset(self)
        self.agents = agents
        return made

    return reset


def return_again(self: Any, actions: Any) -> Any:
    made = Pair.step(self, actions)
    self.agents = ["a", "b"]
    return made


ODD: list[tuple[dict[str, Any], str]] = [
    ({"reset": starting_with(None)}, "has no 'agents', the list"),
    ({"reset": starting_with([])}, "has no agents after reset"),
    ({"reset": starting_with(["a", "c"])}, "has the agent 'c', and possible_agents lists"),
    ({"reset": starting_with(["a"]), "step": return_again}, "'b' in agents again"),
    ({"reset": lambda self, **_: {}}, r"reset\(\) must return observations, infos"),
    ({"step": lambda self, actions: ({}, {}, {}, {})}, r"step\(\) must return observations"),
    ({"step": step_of(infos=None)}, r"step\(\) must return observations"),
    ({"step": step_of(observations={})}, "gave no observation of the agent 'a'"),
    ({"step": step_of(observations={"z": 1})}, "has the agent 'z'"),
    ({"step": step_of(rewards={"a": 1.0})}, "gave no reward of the agent 'b'"),
    (
        {"step": step_of(terminated={"__all__": False})},
        "gave no flag 'terminated' of the agent 'a'",
    ),
    ({"step": step_of(truncated={"a": None, "b": None})}, "gave None for 'truncated'"),
    ({"step": step_of(observations={"a": np.ones(2), "b": {}})}, "of the agent 'a': 'observation'"),
    ({"possible_agents": []}, "must list agents, each once"),
    ({"possible_agents": ["a", "next"]}, "lists 'next', which cannot be"),
    ({"possible_agents": [0]}, "lists 0, which cannot be"),
    ({"action_space": {}}, r"has no method action_space\(agent\)"),
]


@pytest.mark.parametrize(("changed", "message"), ODD, ids=[message for _, message in ODD])
def test_an_environment_that_breaks_the_interface_is_an_error(
    changed: dict[str, Any], message: str
) -> None:
    odd: Any = type("Odd", (Pair,), changed)
    with (
        pytest.raises(RemoteCallError, match=message),
        Collector(odd, None, scheme="none", frames_per_batch=4) as collector,
    ):
        next(collector)


def test_an_environment_without_a_list_of_its_agents_is_an_error() -> None:
    generated: Any = type("Generated", (), {n: v for n, v in vars(Pair).items() if callable(v)})
    with pytest.raises(TypeError, match="has no 'possible_agents', the list"):
        as_env(generated())


def test_a_policy_that_leaves_out_an_agent_is_an_error() -> None:
    def one(tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["a", "action"] = torch.tensor(1)
        return tensordict

    with (
        pytest.raises(RemoteCallError, match="gave no action for the agent 'b'"),
        Collector(Pair, one, scheme="none", frames_per_batch=4) as collector,
    ):
        next(collector)


def test_an_agent_that_is_not_there_from_the_start_has_left() -> None:
    class Absent(Pair):
        reset = starting_with(["b"])

    with Collector(Absent, ones, scheme="none", frames_per_batch=8) as collector:
        batch = next(collector)
    assert batch["a", "done"].all()
    assert not batch["a", "observation"].any()
    assert not batch["next", "a", "reward"].any()
    assert batch["next", "done"].flatten().tolist() == [False, False, False, True] * 2


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
