"""Environments of all kinds: Gymnasium's, vectors, and several as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import (
    DictInfoToList,
    NormalizeObservation,
    RecordEpisodeStatistics,
)
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from sync_collector.envs import ArrayEnv, CountingEnv, GymEnv
from sync_collector.envs.adapt import as_env, stack_envs
from sync_collector.envs.limit import limit_frames
from sync_collector.envs.protocol import FLAGS
from sync_collector.envs.vector import VectorGymEnv
from sync_collector.rollout import Rollout, RolloutOptions

pytestmark = pytest.mark.timeout(60)


class Count(gymnasium.Env[Any, Any]):
    """Observes how many steps its episode has, and ends after some."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self._length = length
        self._steps = 0
        self.closed = False

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        seen = np.full(1, self._steps, np.float32)
        return seen, float(action), self._steps >= self._length, False, {}

    def close(self) -> None:
        self.closed = True


class Dicts(Count):
    """The same with an observation in parts, one of them discrete."""

    observation_space = gymnasium.spaces.Dict(  # type: ignore[assignment]
        {
            "count": gymnasium.spaces.Box(0, 100, (1,), np.float32),
            "odd": gymnasium.spaces.Discrete(2),
        }
    )

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._parts(super().reset(seed=seed)[0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, *rest = super().step(action)
        return (self._parts(seen), *rest)  # type: ignore[return-value]

    def _parts(self, seen: Any) -> dict[str, Any]:
        return {"count": seen, "odd": self._steps % 2}


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


class Hands(CountingEnv):
    """Acts with both hands."""

    action_keys = ("left", ("other", "right"))

    def rand_action(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        tensordict["left"], tensordict["other", "right"] = torch.ones(1), torch.full((2,), 2)
        return tensordict

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        action = tensordict["left"] + tensordict["other", "right"].sum()
        return super().step(tensordict.copy().set("action", action)).exclude("action")


class Left(nn.Module):
    """Chooses the first of two actions, everywhere."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.tensor([1, 0]).expand(*observation.shape[:-1], 2)


class Zero(nn.Module):
    """Acts with zeros."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.zeros_like(observation)


def collect(env: Any, policy: Any, frames: int, **options: Any) -> TensorDictBase:
    return Rollout(env, policy, 0, RolloutOptions(frames_per_batch=frames, **options)).collect()


def seen(batch: TensorDictBase, *key: str) -> list[Any]:
    return list(batch[key].squeeze(-1).tolist())


def three(count: type[Count] = Count) -> list[Callable[[], Count]]:
    return [lambda: count(2), lambda: count(3), lambda: count(100)]


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
    assert seen(batch, "observation") == list(range(length)) * (6 // length)
    assert seen(batch, "action") == seen(batch, "observation")
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
    assert seen(batch, "observation") == [[0, 1, 0, 1], [0, 1, 2, 0]]
    assert seen(batch, "next", "observation") == [[1, 2, 1, 2], [1, 2, 3, 1]]
    assert not batch["done"].any()


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("longest", [-1, 2])
def test_vector_environments(mode: AutoresetMode, longest: int) -> None:
    vector = as_env(SyncVectorEnv(three(), autoreset_mode=mode))
    batch = collect(vector, Left(), 18, max_frames_per_traj=longest)
    if longest == 2:
        assert seen(batch, "observation") == [[0, 1] * 3] * 3
        assert seen(batch, "next", "observation") == [[1, 2] * 3] * 3
        assert batch["next", "truncated"].sum() == 9
        return
    assert seen(batch, "observation") == [[0, 1] * 3, [0, 1, 2] * 2, [0, 1, 2, 3, 4, 5]]
    assert seen(batch, "next", "observation") == [[1, 2] * 3, [1, 2, 3] * 2, [1, 2, 3, 4, 5, 6]]
    assert seen(batch, "next", "done") == [[False, True] * 3, [False, False, True] * 2, [False] * 6]
    assert batch["action"].dtype == torch.int64


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_environments_with_parts(mode: AutoresetMode) -> None:
    vector = as_env(SyncVectorEnv(three(Dicts), autoreset_mode=mode))
    batch = collect(vector, None, 12)
    assert seen(batch, "next", "count") == [[1, 2, 1, 2], [1, 2, 3, 1], [1, 2, 3, 4]]
    odd = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 1], [1, 0, 1, 0]])
    assert torch.equal(batch["next", "odd"], nn.functional.one_hot(odd))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_environment_is_several_single_ones(mode: AutoresetMode) -> None:
    made = [lambda: gymnasium.make("CartPole-v1")] * 2
    vector, single = (
        VectorGymEnv(SyncVectorEnv(made, autoreset_mode=mode)),
        GymEnv(made[0], num_envs=2),
    )
    assert vector.set_seed(3) == single.set_seed(3)
    ours, theirs = (collect(env, Left(), 60) for env in (vector, single))
    assert (ours == theirs).all()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_environments_in_processes(mode: AutoresetMode) -> None:
    env = VectorGymEnv(AsyncVectorEnv(three()[:2], autoreset_mode=mode))
    try:
        batch = collect(env, Left(), 8, max_frames_per_traj=3)
        assert seen(batch, "next", "observation") == [[1, 2, 1, 2], [1, 2, 3, 1]]
    finally:
        env.close()


def test_a_vector_environment_that_resets_when_it_likes() -> None:
    entry = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    with pytest.raises(TypeError, match="autoreset_mode"):
        VectorGymEnv(entry)
    with pytest.raises(TypeError, match="autoreset_mode"):
        as_env(RecordEpisodeStatistics(entry))
    entry.close()


@pytest.mark.parametrize("mode", [None, "sync", "async", "vector_entry_point"])
def test_vectors_by_an_id(mode: str | None) -> None:
    made = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=mode, max_episode_steps=5)
    if mode in ("sync", "async"):
        vector: Any = as_env(made)
    else:
        with pytest.warns(UserWarning, match="vectorization_mode='sync'"):
            vector = as_env(made)
    single = GymEnv(lambda: gymnasium.make("CartPole-v1", max_episode_steps=5), num_envs=2)
    try:
        assert vector.set_seed(3) == single.set_seed(3)
        ours, theirs = (collect(env, Left(), 40) for env in (vector, single))
    finally:
        vector.close()
    assert (ours == theirs).all()
    assert ours["next", "truncated"].sum() == 8


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("kind", [Count, Dicts])
def test_vector_environments_whose_infos_are_lists(mode: AutoresetMode, kind: type[Count]) -> None:
    made = DictInfoToList(SyncVectorEnv(three(kind), autoreset_mode=mode))
    key = "count" if kind is Dicts else "observation"
    batch = collect(as_env(made), Left() if kind is Count else None, 12)
    assert seen(batch, key) == [[0, 1, 0, 1], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert seen(batch, "next", key) == [[1, 2, 1, 2], [1, 2, 3, 1], [1, 2, 3, 4]]


def test_a_vector_environment_that_cannot_reset_a_part() -> None:
    made = RecordEpisodeStatistics(NormalizeObservation(SyncVectorEnv(three())))
    with pytest.raises(TypeError, match=r"wrappers=\[gymnasium.wrappers.NormalizeObservation\]"):
        as_env(made)
    alone = NormalizeObservation(SyncVectorEnv(three()[:1]))
    assert collect(as_env(alone), Left(), 8)["next", "done"].sum() == 4
    each = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=2,
        vectorization_mode="sync",
        wrappers=[gymnasium.wrappers.NormalizeObservation],
    )
    assert collect(as_env(each), None, 200)["next", "done"].sum() > 2


@pytest.mark.parametrize("reward", [None, 1.0, [1.0], np.ones((3, 1)), [1.0, [2.0], 3.0]])
def test_a_vector_environment_without_a_reward_for_each(reward: Any) -> None:
    class Unpaid(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            observation, _, *rest = super().step(actions)
            return observation, reward, *rest

    with pytest.raises(TypeError, match=r"Unpaid gave the reward .+ return 3 numbers, one for"):
        collect(as_env(Unpaid(three())), Left(), 6)


class Wide(Count):
    """Says that it observes three numbers, and gives one."""

    observation_space = gymnasium.spaces.Box(0, 100, (3,), np.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv(Wide),
        lambda: GymEnv(Wide, num_envs=2),
        lambda: stack_envs([GymEnv(Wide), GymEnv(Wide)]),
    ],
    ids=["single", "batch", "stack"],
)
def test_an_observation_of_another_size_than_its_space(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"'observation' .* shape \(1,\), .* declares \(3,\)"):
        collect(make(), None, 4)


def test_a_vector_environment_is_no_single_one() -> None:
    with pytest.raises(TypeError, match="give the vector environment itself"):
        GymEnv(lambda: SyncVectorEnv(three()))


@pytest.mark.parametrize("by_arrays", [True, False])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_several_as_one(by_arrays: bool, num_envs: int | None) -> None:
    lengths = (2, 3)
    if by_arrays:
        made: list[Any] = [GymEnv(partial(Count, n), num_envs=num_envs) for n in lengths]
    else:
        made = [CountingEnv(n, num_envs=num_envs) for n in lengths]
    env = stack_envs(made)
    assert isinstance(env, ArrayEnv) is by_arrays
    assert env.batch_size == torch.Size([2] if num_envs is None else [2, 2])
    batch = collect(env, None, 4 * env.batch_size.numel())
    expected: list[Any] = [[1, 2, 1, 2], [1, 2, 3, 1]]
    if num_envs is not None:
        expected = [[row, row] for row in expected]
    assert seen(batch, "next", "observation") == expected
    assert batch.names == [*[None] * len(env.batch_size), "time"]


def test_several_as_one_that_act_in_parts() -> None:
    batch = collect(stack_envs([Hands(), Hands()]), None, 6, max_frames_per_traj=2)
    assert seen(batch, "left") == [[1.0] * 3] * 2
    assert batch["other", "right"].shape == (2, 3, 2)
    assert seen(batch, "next", "reward") == [[5.0] * 3] * 2


def test_several_as_one_are_seeded_in_line_and_closed() -> None:
    made = [CountingEnv(3), CountingEnv(3)]
    env: Any = stack_envs(made)
    assert env.set_seed(5) == 7
    assert env.reset()["observation"].flatten().tolist() == [5, 6]
    env.close()
    assert all(one.is_closed for one in made)


@pytest.mark.parametrize(
    "made",
    [
        [CountingEnv(), CountingEnv(num_envs=2)],
        [GymEnv("CartPole-v1"), GymEnv("Pendulum-v1")],
    ],
)
def test_several_that_differ(made: list[Any]) -> None:
    with pytest.raises(ValueError, match="make them alike"):
        stack_envs(made)


@pytest.mark.parametrize("env", [CountingEnv(3), GymEnv(lambda: Count(3))])
def test_a_limit(env: Any) -> None:
    batch = collect(env, None, 6, max_frames_per_traj=2)
    assert seen(batch, "next", "observation") == [1, 2] * 3
    assert seen(batch, "step_count") == [0, 1] * 3
    assert seen(batch, "next", "step_count") == [1, 2] * 3
    assert seen(batch, "next", "truncated") == seen(batch, "next", "done") == [False, True] * 3
    assert not batch["next", "terminated"].any()
    assert batch["step_count"].dtype == batch["next", "step_count"].dtype == torch.int64
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("by_arrays", [True, False])
def test_a_limit_counts_for_each_environment(by_arrays: bool) -> None:
    lengths = (1, 3, 100)
    arrays = stack_envs([GymEnv(partial(Count, n)) for n in lengths])
    made = arrays if by_arrays else CountingEnv(lengths, num_envs=3)
    batch = collect(made, None, 18, max_frames_per_traj=4)
    assert seen(batch, "next", "step_count") == [[1] * 6, [1, 2, 3] * 2, [1, 2, 3, 4, 1, 2]]
    assert seen(batch, "next", "observation") == seen(batch, "next", "step_count")
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
    assert seen(batch, "step_count") == [[0] * 6, [0, 1, 2] * 2, [0, 1, 2] * 2][:num_envs]
    assert seen(batch, "observation") == seen(batch, "step_count")
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
    assert seen(batch, "action") == [0, 1, 2, 0, 1]


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
