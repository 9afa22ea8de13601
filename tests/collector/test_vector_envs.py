"""Vector environments, and several environments as one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import (
    DictInfoToList,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
)
from tensordict import TensorDictBase
from tests.collector.gym_envs import Count, Dicts, Left, collect, three
from torch import nn

from sync_collector.envs import ArrayEnv, CountingEnv, GymEnv
from sync_collector.envs.adapt import as_env, stack_envs
from sync_collector.envs.arrays import StepLostError
from sync_collector.envs.gym import EnvOptions
from sync_collector.envs.vector import VectorGymEnv
from sync_collector.rollout import Rollout, RolloutOptions
from sync_collector.testing import values

pytestmark = pytest.mark.timeout(60)


class Hands(CountingEnv):
    """Acts with both hands."""

    action_keys = ("left", ("other", "right"))

    def rand_action(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        tensordict["left"], tensordict["other", "right"] = torch.ones(1), torch.full((2,), 2)
        return tensordict

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        action = tensordict["left"] + tensordict["other", "right"].sum()
        return super().step(tensordict.copy().set("action", action)).exclude("action")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_environments_with_parts(mode: AutoresetMode) -> None:
    vector = as_env(SyncVectorEnv(three(Dicts), autoreset_mode=mode))
    batch = collect(vector, None, 12)
    assert values(batch, "next", "count") == [[1, 2, 1, 2], [1, 2, 3, 1], [1, 2, 3, 4]]
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
    # The fork server then imports the environments once for all processes.
    multiprocessing.set_forkserver_preload(["tests.collector.gym_envs"])
    made = AsyncVectorEnv(three()[:2], autoreset_mode=mode, context="forkserver")
    env = VectorGymEnv(made)
    try:
        batch = collect(env, Left(), 8, max_frames_per_traj=3)
        assert values(batch, "next", "observation") == [[1, 2, 1, 2], [1, 2, 3, 1]]
    finally:
        env.close()


class Rigid(CartPoleVectorEnv):
    """Resets all environments, whatever part is asked for."""

    def reset(self, **given: Any) -> Any:
        return super().reset(**given)


def test_a_vector_environment_that_resets_when_it_likes() -> None:
    with pytest.raises(TypeError, match="autoreset_mode"):
        VectorGymEnv(Rigid(2))
    with pytest.raises(TypeError, match=r"take.*options=\{'reset_mask'"):
        as_env(RecordEpisodeStatistics(Rigid(2)))
    registered = Rigid(2)
    registered.spec = gymnasium.spec("CartPole-v1")
    with pytest.warns(UserWarning, match="vectorization_mode='sync'"):
        assert collect(as_env(registered), Left(), 60)["next", "done"].any()


@pytest.mark.parametrize("wrap", [lambda env: env, RecordEpisodeStatistics])
def test_the_cart_pole_of_gymnasium_as_it_is(wrap: Callable[[Any], Any]) -> None:
    made = gymnasium.make_vec(
        "CartPole-v1", 8, vectorization_mode="vector_entry_point", max_episode_steps=20
    )
    env: Any = as_env(wrap(made))
    assert env.set_seed(3) == env.set_seed(3)
    first, second = (collect(env, None, 8 * 50), collect(env, None, 8 * 50))
    assert isinstance(made, CartPoleVectorEnv)
    for batch in (first, second):
        done = batch["next", "done"].squeeze(-1)
        assert done[:, :-1].any()
        after, following = batch["observation"][:, 1:], batch["next", "observation"]
        # A step begins where the last one ended, but for episodes that begin.
        assert (after == following[:, :-1])[~done[:, :-1]].all()
        assert after[done[:, :-1]].abs().max() <= 0.05
        fallen = following[..., 2].abs() > 12 * np.pi / 180
        assert torch.equal(batch["next", "terminated"].squeeze(-1), fallen)
        assert (batch["next", "reward"] == 1).all()
    assert not torch.equal(first["observation"], second["observation"])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vectors_by_an_id(mode: str | None) -> None:
    made = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=mode, max_episode_steps=5)
    vector: Any = as_env(made)
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
    assert values(batch, key) == [[0, 1, 0, 1], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert values(batch, "next", key) == [[1, 2, 1, 2], [1, 2, 3, 1], [1, 2, 3, 4]]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_a_reset_of_a_part_leaves_the_sums_of_wrappers(mode: AutoresetMode) -> None:
    rewards = NormalizeReward(SyncVectorEnv(three(), autoreset_mode=mode), gamma=0.5)
    env: Any = as_env(RecordEpisodeStatistics(rewards), EnvOptions(info_keys=[("episode", "l")]))
    following = collect(env, lambda observation: torch.ones(3, dtype=torch.int64), 3 * 12)["next"]
    ended, lengths = following["done"].squeeze(-1), following["episode", "l"]
    assert lengths[0, ended[0]].tolist() == [2.0] * 6
    assert lengths[1, ended[1]].tolist() == [3.0] * 4
    # The return of the third environment, whose episode has not ended, before rewards are divided.
    assert rewards.accumulated_reward[2] == 2 - 0.5**11


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
    assert collect(as_env(each), Left(), 200)["next", "done"].sum() > 2


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
    assert values(batch, "next", "observation") == expected
    assert batch.names == [*[None] * len(env.batch_size), "time"]


def test_several_as_one_that_act_in_parts() -> None:
    batch = collect(stack_envs([Hands(), Hands()]), None, 6, max_frames_per_traj=2)
    assert values(batch, "left") == [[1.0] * 3] * 2
    assert batch["other", "right"].shape == (2, 3, 2)
    assert values(batch, "next", "reward") == [[5.0] * 3] * 2


class CutShort(CountingEnv):
    """Raises in some step of all environments that are made, once."""

    def __init__(self, left: list[int]) -> None:
        super().__init__(100)
        self._left = left

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        cut_short(self._left)
        return super().step(tensordict)


class CountCutShort(Count):
    """The same."""

    def __init__(self, left: list[int]) -> None:
        super().__init__(100)
        self._left = left

    def step(self, action: Any) -> Any:
        cut_short(self._left)
        return super().step(action)


def cut_short(left: list[int]) -> None:
    left[0] -= 1
    if not left[0]:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["gym", "arrays", "tensordicts"])
def test_no_environment_acts_twice_where_another_is_interrupted(kind: str) -> None:
    left = [8]  # the second environment's third step
    made: dict[str, Callable[[], Any]] = {
        "gym": lambda: GymEnv(lambda: CountCutShort(left), num_envs=3),
        "arrays": lambda: stack_envs([GymEnv(lambda: CountCutShort(left)) for _ in range(3)]),
        "tensordicts": lambda: stack_envs([CutShort(left) for _ in range(3)]),
    }
    rollout = Rollout(made[kind](), None, 0, RolloutOptions(frames_per_batch=12))
    with pytest.raises(KeyboardInterrupt):
        rollout.collect()
    assert values(rollout.collect(), "next", "observation") == [[1, 2, 3, 4]] * 3


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("steps", [2, 4])
def test_episodes_are_cut_where_a_vector_environment_is_interrupted(
    mode: AutoresetMode, steps: int
) -> None:
    left = [8]  # the second environment's third step: of this batch, or the first of the next one
    env = as_env(SyncVectorEnv([lambda: CountCutShort(left)] * 3, autoreset_mode=mode))
    options = RolloutOptions(frames_per_batch=3 * steps, episode_stats=True)
    rollout = Rollout(env, Left(), 0, options)
    before = rollout.collect() if steps == 2 else None
    with pytest.raises(KeyboardInterrupt):
        rollout.collect()
    batch = rollout.collect()
    if before is not None:
        assert not batch["next", "done"].any()
        batch = torch.cat([before, batch], 1)
    else:
        assert values(batch, "next", "truncated") == [[False, True, False, False]] * 3
    assert values(batch, "observation") == [[0, 1, 0, 1]] * 3
    assert values(batch, "next", "observation") == [[1, 2, 1, 2]] * 3
    assert values(batch, "next", "episode_length") == [[1, 2, 1, 2]] * 3
    ids = batch["collector", "traj_ids"]
    assert (ids[:, 0] == ids[:, 1]).all()
    assert (ids[:, 2] == ids[:, 3]).all()
    assert len(ids.unique()) == 6


def test_a_vector_environment_that_is_stepped_after_an_exception() -> None:
    left = [2]
    env = VectorGymEnv(SyncVectorEnv([lambda: CountCutShort(left)] * 2))
    action = torch.tensor([[1, 0]] * 2)
    step = env.reset().set("action", action)
    with pytest.raises(KeyboardInterrupt):
        env.step(step)
    with pytest.raises(
        StepLostError, match=r"some of its environments may have acted; .* reset\(\)"
    ):
        env.step(step)
    following = env.step(env.reset().set("action", action))["next"]
    assert following["observation"].tolist() == [[1.0], [1.0]]


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
    assert values(batch, "next", "observation") == [1, 2] * 3
    assert values(batch, "step_count") == [0, 1] * 3
    assert values(batch, "next", "step_count") == [1, 2] * 3
    assert values(batch, "next", "truncated") == values(batch, "next", "done") == [False, True] * 3
    assert not batch["next", "terminated"].any()
    assert batch["step_count"].dtype == batch["next", "step_count"].dtype == torch.int64
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 1, 1, 2, 2]
