"""Environments of all kinds: Gymnasium's, and the user's own; limits of episodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tests.collector.gym_envs import Count, Dicts, Left, collect, three
from torch import Tensor, nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv, GymEnv
from sync_collector.envs.adapt import as_env, stack_envs
from sync_collector.envs.limit import limit_frames
from sync_collector.envs.protocol import FLAGS
from sync_collector.envs.vector import VectorGymEnv
from sync_collector.rollout import Rollout, RolloutOptions
from sync_collector.testing import values
from sync_core import RemoteCallError

pytestmark = pytest.mark.timeout(60)


class Plain:
    """An environment of the user's own, with what has to be there and nothing else."""

    batch_size = torch.Size([2])

    def __init__(self) -> None:
        self._steps = torch.zeros(2, 1)

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        where = ... if tensordict is None else tensordict["_reset"]
        self._steps[where] = 0
        return TensorDict({"observation": self._steps.clone()}, batch_size=[2])

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        self._steps += 1
        outcome = {
            "observation": self._steps.clone(),
            "reward": torch.zeros(2, 1),
            "done": self._steps >= torch.tensor([[2.0], [3.0]]),
        }
        return tensordict.set("next", TensorDict(outcome, batch_size=[2]))


class Keeping:
    """Counts to 3 in TensorDicts that it keeps, and gives every time."""

    batch_size = torch.Size()

    def __init__(self) -> None:
        self._root = TensorDict({"observation": torch.zeros(1)})
        zeros = {"observation": torch.zeros(1), "reward": torch.zeros(1), "done": torch.zeros(1)}
        self._outcome = TensorDict(zeros)

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        self._outcome["observation"].zero_()
        return self._root

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        self._outcome["observation"].add_(1)
        self._outcome["done"].copy_(self._outcome["observation"] >= 3)
        return tensordict.set("next", self._outcome)


class Flat(CountingEnv):
    """A `CountingEnv` whose flags have no trailing dimension."""

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        return self._flat(super().reset(tensordict))

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        self._flat(super().step(tensordict)["next"])
        return tensordict

    def _flat(self, made: TensorDictBase) -> TensorDictBase:
        return made.update({name: made[name].squeeze(-1) for name in FLAGS})


class Zero(nn.Module):
    """Acts with zeros."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.zeros_like(observation)


def test_kinds_are_told_by_their_members() -> None:
    assert isinstance(as_env(Count()), GymEnv)
    assert isinstance(as_env(gymnasium.make("CartPole-v1")), GymEnv)
    assert isinstance(as_env(SyncVectorEnv(three())), VectorGymEnv)
    for own in (CountingEnv(), Plain(), GymEnv(Count)):
        assert as_env(own) is own


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (7, TypeError, "made a int, which has no reset"),
        (CountingEnv(num_envs=0), ValueError, "holds no environment"),
        (type("Bare", (), {"reset": print, "step": print})(), TypeError, "batch_size = torch.Size"),
    ],
)
def test_what_is_no_environment(made: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_env(made)


def test_actions_in_bfloat16() -> None:
    env = GymEnv("Pendulum-v1")
    policy = nn.Linear(3, 1).to(torch.bfloat16)

    def act(observation: Tensor) -> Tensor:
        action: Tensor = policy(observation.bfloat16())
        return action

    batch = collect(env, act, 3)
    assert batch["action"].dtype == torch.bfloat16
    step = env.step(TensorDict({"action": batch["action"][0]}))
    assert step["next", "observation"].shape == (3,)


@pytest.mark.parametrize("shape", [(), (3, 2)])
@pytest.mark.parametrize("kind", ["stacked", "several", "vector"])
def test_an_action_for_other_than_each_environment(kind: str, shape: tuple[int, ...]) -> None:
    made: Any = {
        "stacked": lambda: stack_envs([GymEnv(Count), GymEnv(Count)]),
        "several": lambda: GymEnv(Count, num_envs=2),
        "vector": lambda: as_env(SyncVectorEnv(three()[:2])),
    }
    actions = iter([torch.ones(shape), *[torch.tensor([[1, 0], [0, 1]])] * 2])

    def act(observation: Tensor) -> Tensor:
        return next(actions)

    rollout = Rollout(made[kind](), act, 0, RolloutOptions(frames_per_batch=4))
    with pytest.raises(TypeError, match=r"must have the shape \(2, …\), .* not \(.*\); let the"):
        rollout.collect()
    assert rollout.collect()["next", "reward"].flatten().tolist() == [0, 0, 1, 1]


def test_an_environment_that_replaces_what_a_policy_carries() -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        td["next"] = TensorDict({"memory": torch.ones(2, 1), "reward": torch.ones(2, 1)}, [2])
        return td.set("action", torch.zeros(2, 1))

    batch = Rollout(Plain(), act, 0, RolloutOptions(frames_per_batch=12)).collect()
    assert batch["observation"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize("limit", [-1, 2])
def test_an_environment_that_keeps_its_tensordicts(limit: int) -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        memory = td.get("memory", torch.zeros(1))
        return td.update({"action": memory, "memory": memory + 1})

    batch = collect(Keeping(), act, 6, max_frames_per_traj=limit)
    length = 3 if limit < 0 else limit
    assert values(batch, "observation") == list(range(length)) * (6 // length)
    assert values(batch, "action") == values(batch, "observation")
    assert batch["next", "truncated"].sum() == (0 if limit < 0 else 3)


@pytest.mark.parametrize("wrapped", ["bare", "limited", "stacked"])
@pytest.mark.parametrize(
    ("method", "give", "message"),
    [
        ("reset", lambda td: dict(td.items()), r"Wrong.reset\(\) gave a dict; .*batch_size=\[2\]"),
        ("reset", lambda td: (td, {}), r"Wrong.reset\(\) gave a tuple; it must return"),
        ("step", lambda td: td["next"], r"Wrong.step\(\) gave a TensorDict without 'next'; "),
        ("step", lambda td: (td, 1.0), r"Wrong.step\(\) gave a tuple; .* under 'next'"),
        ("step", lambda td: None, r"Wrong.step\(\) gave a NoneType; it must return"),
    ],
)
def test_an_environment_that_gives_something_else(
    method: str, give: Callable[[Any], Any], message: str, wrapped: str
) -> None:
    class Wrong(Plain):
        pass

    def wrong(self: Any, *tensordict: Any) -> Any:
        return give(getattr(Plain, method)(self, *tensordict))

    setattr(Wrong, method, wrong)
    env = stack_envs([Wrong(), Wrong()]) if wrapped == "stacked" else Wrong()
    with pytest.raises(TypeError, match=message):
        collect(env, Zero(), 4, max_frames_per_traj=2 if wrapped == "limited" else -1)


def test_an_environment_with_the_least_members() -> None:
    batch = collect(Plain(), Zero(), 8)
    assert values(batch, "observation") == [[0, 1, 0, 1], [0, 1, 2, 0]]
    assert values(batch, "next", "observation") == [[1, 2, 1, 2], [1, 2, 3, 1]]
    assert not batch["done"].any()


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("longest", [-1, 2])
def test_vector_environments(mode: AutoresetMode, longest: int) -> None:
    vector = as_env(SyncVectorEnv(three(), autoreset_mode=mode))
    batch = collect(vector, Left(), 18, max_frames_per_traj=longest)
    if longest == 2:
        assert values(batch, "observation") == [[0, 1] * 3] * 3
        assert values(batch, "next", "observation") == [[1, 2] * 3] * 3
        assert batch["next", "truncated"].sum() == 9
        return
    assert values(batch, "observation") == [[0, 1] * 3, [0, 1, 2] * 2, [0, 1, 2, 3, 4, 5]]
    assert values(batch, "next", "observation") == [[1, 2] * 3, [1, 2, 3] * 2, [1, 2, 3, 4, 5, 6]]
    assert values(batch, "next", "done") == [
        [False, True] * 3,
        [False, False, True] * 2,
        [False] * 6,
    ]
    assert batch["action"].dtype == torch.int64


@pytest.mark.parametrize("by_arrays", [True, False])
def test_a_limit_counts_for_each_environment(by_arrays: bool) -> None:
    lengths = (1, 3, 100)
    arrays = stack_envs([GymEnv(partial(Count, n)) for n in lengths])
    made = arrays if by_arrays else CountingEnv(lengths, num_envs=3)
    batch = collect(made, None, 18, max_frames_per_traj=4)
    assert values(batch, "next", "step_count") == [[1] * 6, [1, 2, 3] * 2, [1, 2, 3, 4, 1, 2]]
    assert values(batch, "next", "observation") == values(batch, "next", "step_count")
    assert batch["next", "truncated"].sum() == 1


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_a_limit_where_flags_have_no_trailing_dimension(stacked: bool, num_envs: int) -> None:
    lengths = (1, 100, 100)[:num_envs]
    made: Any = Flat(lengths, num_envs=num_envs)
    if stacked:
        made = stack_envs([Flat(length) for length in lengths])
    shapes = []

    def act(tensordict: TensorDictBase) -> TensorDictBase:
        shapes.append(tensordict["truncated"].shape)
        return tensordict.set("action", tensordict["observation"])

    batch = collect(made, act, 6 * num_envs, max_frames_per_traj=3)
    assert values(batch, "step_count") == [[0] * 6, [0, 1, 2] * 2, [0, 1, 2] * 2][:num_envs]
    assert values(batch, "observation") == values(batch, "step_count")
    assert batch["next", "truncated"].shape == (num_envs, 6, 1)
    assert batch["next", "truncated"].sum() == 2 * (num_envs - 1)
    assert set(shapes) == {(num_envs,)}


def test_a_limit_needs_its_name() -> None:
    env = limit_frames(CountingEnv(), 2)
    with pytest.raises(ValueError, match="'step_count' of its own"):
        limit_frames(env, 3).reset()
    with pytest.raises(ValueError, match="'step_count' of its own"):
        limit_frames(limit_frames(GymEnv("CartPole-v1"), 2), 3)


def test_a_policy_may_use_the_count() -> None:
    def act(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", tensordict["step_count"].float())

    batch = collect(CountingEnv(100), act, 5, max_frames_per_traj=3)
    assert values(batch, "action") == [0, 1, 2, 0, 1]


class LikeGymnasium:
    """Has what Gymnasium's environments have to have, and no base class."""

    observation_space = Count.observation_space
    action_space = Count.action_space

    def __init__(self) -> None:
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._steps = seed or 0
        return np.full(1, self._steps, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._steps += 1
        return np.full(1, self._steps, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("number", [1, 2])
def test_a_class_that_is_like_gymnasiums(number: int) -> None:
    envs = [as_env(LikeGymnasium()) for _ in range(number)]
    made = Rollout(stack_envs(envs), None, 0, RolloutOptions(frames_per_batch=2 * number))
    made.collect()
    made.set_seed(0, static_seed=True)
    first = made.collect()["observation"].flatten().tolist()
    assert first == [0.0, 1.0] * number
    state = made.state_dict()
    following = made.collect()["observation"].flatten().tolist()
    made.load_state_dict(state)
    assert made.collect()["observation"].flatten().tolist() == following == [2.0, 3.0] * number
    made.close()


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (LikeGymnasium, {"num_workers_per_collector": 2}),
        (CountingEnv, {"num_workers_per_collector": 2}),
        (LikeGymnasium, {"num_workers": 2, "scheme": "thread"}),
        (LikeGymnasium, {}),
    ],
    ids=["stacked", "stacked without an adapter", "threads", "evaluation"],
)
def test_an_environment_that_is_stepped_already(made: Any, options: Any) -> None:
    one = made()
    options = {"scheme": "none", "frames_per_batch": 4, **options}

    def collect_and_evaluate() -> None:
        with Collector(lambda: one, **options) as collector:
            next(collector)
            collector.evaluate(1)

    with pytest.raises((TypeError, RemoteCallError), match=r"is stepped already.* make a new one"):
        collect_and_evaluate()
    # After that collector, another one may have it.
    with Collector(lambda: one, scheme="none", frames_per_batch=4) as collector:
        next(collector)


def test_what_is_nearly_like_gymnasiums_is_told_what_to_write() -> None:
    class TakesNoSeed(LikeGymnasium):
        def reset(self) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
            return super().reset()

    class GivesNoReward(LikeGymnasium):
        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            return np.zeros(1, np.float32), None, False, False, {}

    made = Rollout(as_env(TakesNoSeed()), None, 0, RolloutOptions(frames_per_batch=2))
    with pytest.raises(TypeError, match=r"TakesNoSeed\.reset\(\) takes no seed; .* seed=None"):
        made.set_seed(0)
    assert made.collect().numel() == 2
    made = Rollout(as_env(GivesNoReward()), None, 0, RolloutOptions(frames_per_batch=2))
    with pytest.raises(TypeError, match="GivesNoReward gave the reward None; let its step"):
        made.collect()


@pytest.mark.parametrize("seen", [{"count": np.zeros(1)}, np.zeros(1), None])
def test_an_observation_without_an_entry_is_told(seen: Any) -> None:
    class Lacking(Dicts):
        def _parts(self, _: Any) -> Any:
            return seen

    given, lacks = type(seen).__name__, "odd" if isinstance(seen, dict) else "count"
    with pytest.raises(TypeError, match=rf"a {given} was observed without '{lacks}', which .* let"):
        as_env(Lacking()).reset()


def test_arrays_without_an_entry_are_told() -> None:
    class Forgets(GymEnv):
        def step_arrays(self, action: Any) -> Any:
            _, *rest = super().step_arrays(action)
            return ({}, *rest)

    made = Rollout(Forgets(Count), None, 0, RolloutOptions(frames_per_batch=2))
    with pytest.raises(TypeError, match="a dict was observed without 'observation', which"):
        made.collect()
