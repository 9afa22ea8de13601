"""Environments follow the protocol, and lose no last observation."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from sync_collector.envs import CountingEnv, GymEnv
from sync_collector.envs.gym import next_seed
from sync_collector.envs.spaces import ObservationCodec, codec
from sync_collector.rollout import Rollout, RolloutOptions


class Line(gymnasium.Env[Any, Any]):
    """Walks to the right; the observation is the place, and the episode ends at ``end``."""

    def __init__(
        self, end: int = 3, observation_space: Any = None, action_space: Any = None
    ) -> None:
        self.observation_space = observation_space or spaces.Box(0, 100, (1,), np.float32)
        self.action_space = action_space or spaces.Discrete(2)
        self.end = end
        self.actions: list[Any] = []
        self.closed = False
        self._place = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place[:] = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self._place += 1
        return self._observe(), 1.0, bool(self._place[0] == self.end), False, {}

    def close(self) -> None:
        self.closed = True

    def _observe(self) -> Any:
        if isinstance(self.observation_space, spaces.Dict):
            return {"place": self._place, "inner": {"kind": 2}}
        if isinstance(self.observation_space, spaces.Discrete):
            return int(self._place[0])
        # The very array that the next step overwrites.
        return self._place


def layout(tensordict: TensorDictBase) -> dict[Any, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        key: (value.dtype, tuple(value.shape))
        for key, value in tensordict.items(include_nested=True, leaves_only=True)
    }


@pytest.mark.parametrize("num_envs", [None, 3])
def test_layout_of_cartpole(num_envs: int | None) -> None:
    env = GymEnv("CartPole-v1", num_envs=num_envs)
    batch = () if num_envs is None else (num_envs,)
    root = {
        "observation": (torch.float32, (*batch, 4)),
        "done": (torch.bool, (*batch, 1)),
        "terminated": (torch.bool, (*batch, 1)),
        "truncated": (torch.bool, (*batch, 1)),
    }
    td = env.reset()
    assert td.batch_size == torch.Size(batch)
    assert layout(td) == root
    td = env.rand_action(td)
    assert layout(td)["action"] == (torch.int64, (*batch, 2))
    assert (td["action"].sum(-1) == 1).all()
    stepped = env.step(td)
    assert stepped is td
    assert layout(td["next"]) == {**root, "reward": (torch.float32, (*batch, 1))}
    env.close()


@pytest.mark.parametrize("num_envs", [None, 3])
def test_layout_of_counting(num_envs: int | None) -> None:
    env = CountingEnv(2, num_envs=num_envs)
    batch = () if num_envs is None else (num_envs,)
    td = env.step(env.rand_action(env.reset()))
    column = (torch.float32, (*batch, 1))
    flag = (torch.bool, (*batch, 1))
    root = {"observation": column, "done": flag, "terminated": flag, "truncated": flag}
    assert layout(td.exclude("next")) == {**root, "action": column}
    assert layout(td["next"]) == {**root, "reward": column}


def test_categorical_actions_are_indices() -> None:
    env = GymEnv("CartPole-v1", categorical=True)
    td = env.rand_action(env.reset())
    assert td["action"].dtype == torch.int64
    assert td["action"].shape == ()
    assert env.step(td)["next", "reward"].item() == 1.0


def test_spaces_that_do_not_start_at_zero() -> None:
    space = spaces.Discrete(3, start=5)
    for categorical, action in ((False, torch.tensor([0, 0, 1])), (True, torch.tensor(2))):
        line = Line(action_space=space)
        env = GymEnv(lambda line=line: line, categorical=categorical)  # type: ignore[misc]
        env.step(env.reset().set("action", action))
        assert line.actions == [7]


def test_discrete_and_nested_observations() -> None:
    env = GymEnv(lambda: Line(observation_space=spaces.Discrete(4)))
    td = env.step(env.rand_action(env.reset()))
    assert td["next", "observation"].tolist() == [0, 1, 0, 0]
    nested = spaces.Dict(
        place=spaces.Box(0, 100, (1,), np.float32), inner=spaces.Dict(kind=spaces.Discrete(3))
    )
    td = GymEnv(lambda: Line(observation_space=nested), num_envs=2).reset()
    assert td["place"].tolist() == [[0.0], [0.0]]
    assert td["inner", "kind"].tolist() == [[0, 0, 1], [0, 0, 1]]


def test_multi_discrete_actions() -> None:
    line = Line(action_space=spaces.MultiDiscrete([2, 3]))
    env = GymEnv(lambda: line)
    env.step(env.reset().set("action", torch.tensor([0, 1, 1, 0, 0])))
    assert line.actions[0].tolist() == [1, 0]
    assert env.rand_action()["action"].sum() == 2


@pytest.mark.parametrize(("categorical", "action"), [(False, [0, 1, 1, 0, 0]), (True, [1, 0])])
def test_several_that_do_not_start_at_zero(categorical: bool, action: list[int]) -> None:
    several = codec(spaces.MultiDiscrete([2, 3], start=[5, 7]), categorical=categorical)
    assert several.decode(np.array(action)).tolist() == [6, 7]
    assert several.encode(np.array([6, 7])).tolist() == action
    assert several.encode_batch(np.array([[6, 7], [6, 7]])).tolist() == [action, action]
    assert several.spec.dtype == np.int64
    with pytest.raises(TypeError, match=r"one-hot|are integers, not float64"):
        several.decode(np.array(action) / 2)


@pytest.mark.parametrize("action", [[0.3, 0.7], [0, 0], [1, 1], [1, 0, 0], 1, [2, 1]], ids=str)
def test_an_action_that_is_not_one_hot_is_an_error(action: Any) -> None:
    env = GymEnv("CartPole-v1", categorical=False)
    with pytest.raises(TypeError, match="one-hot"):
        env.step(env.reset().set("action", torch.tensor(action)))


def test_a_categorical_action_must_be_an_integer() -> None:
    env = GymEnv("CartPole-v1", categorical=True)
    with pytest.raises(TypeError, match="categorical"):
        env.step(env.reset().set("action", torch.tensor([0, 1])))


def test_a_continuous_action_has_the_shape_of_its_space() -> None:
    env = GymEnv("Pendulum-v1")
    with pytest.raises(TypeError, match=r"must have the shape \(1,\), not \(2,\)"):
        env.step(env.reset().set("action", torch.zeros(2)))


@pytest.mark.parametrize("shape", [(), (6,), (1, 5)])
def test_one_hot_vectors_side_by_side_have_the_shape_of_their_space(shape: Any) -> None:
    several = codec(spaces.MultiDiscrete([2, 3]), categorical=False)
    with pytest.raises(TypeError, match=r"must have the shape \(5,\), not"):
        several.decode(np.zeros(shape))


@pytest.mark.parametrize("name", ["reward", "action", "done", "collector"])
def test_an_observation_with_the_name_of_something_else(name: str) -> None:
    space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Discrete(2)})
    space[name] = gymnasium.spaces.Discrete(2)
    with pytest.raises(TypeError, match=f"'{name}' is observed, and a batch has"):
        ObservationCodec(space, categorical=True)


def test_several_dimensions_of_discrete_values() -> None:
    space = gymnasium.spaces.MultiDiscrete(np.array([[2, 3], [2, 2]]))
    with pytest.raises(TypeError, match="give categorical=True"):
        codec(space, categorical=False)
    assert codec(space, categorical=True).spec.shape == (2, 2)


@pytest.mark.parametrize("num_envs", [None, 2])
def test_rewards_with_a_dimension_of_their_own(num_envs: int | None) -> None:
    class Paying(gymnasium.RewardWrapper[Any, Any]):
        def reward(self, reward: Any) -> Any:
            return np.array([float(reward) + 1])

    env = GymEnv(lambda: Paying(gymnasium.make("CartPole-v1")), num_envs=num_envs)
    batch = Rollout(env, None, 0, RolloutOptions(frames_per_batch=4)).collect()
    assert batch["next", "reward"].flatten().tolist() == [2.0] * 4


@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize(
    "reward",
    [None, [1.0], (1.0, 2.0), np.ones(2), torch.ones(2), "much"],
    ids=["none", "list", "tuple", "array", "tensor", "string"],
)
def test_a_reward_that_is_no_number(reward: Any, num_envs: int | None) -> None:
    class Unfinished(Line):
        def step(self, action: Any) -> Any:
            observation, _, *flags = super().step(action)
            return observation, reward, *flags

    env = GymEnv(lambda: gymnasium.wrappers.TimeLimit(Unfinished(), 5), num_envs=num_envs)
    message = r"Unfinished gave the reward .+; let its step\(\) return a number"
    with pytest.raises(TypeError, match=message):
        Rollout(env, None, 0, RolloutOptions(frames_per_batch=2)).collect()


@pytest.mark.parametrize("num_envs", [None, 2])
def test_environments_of_the_interface_before_gymnasium(num_envs: int | None) -> None:
    class OldStep(Line):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, _, info = super().step(action)
            return observation, reward, terminated, info

    class OldReset(Line):
        def reset(self, **options: Any) -> Any:
            return super().reset(**options)[0]

    for old, message in ((OldStep, r"OldStep\.step\(\)"), (OldReset, r"OldReset\.reset\(\)")):
        env = GymEnv(old, num_envs=num_envs)
        with pytest.raises(TypeError, match=f"{message} must return .* and a dict, as those of"):
            Rollout(env, None, 0, RolloutOptions(frames_per_batch=2)).collect()


def test_a_space_without_arrays_is_an_error() -> None:
    with pytest.raises(TypeError, match="Text"):
        GymEnv(lambda: Line(observation_space=spaces.Text(3)))


def test_the_true_last_observation_survives_the_reset() -> None:
    lines = iter([Line(2), Line(3)])
    env = GymEnv(lambda: next(lines), num_envs=2)
    td = env.reset()
    seen, done, begun = [], [], []
    for _ in range(4):
        td, root = env.step_and_maybe_reset(env.rand_action(td))
        seen.append(td["next", "observation"].flatten().tolist())
        done.append(td["next", "done"].flatten().tolist())
        begun.append(root["observation"].flatten().tolist())
        assert not root["done"].any()
        assert "reward" not in root
        td = root
    assert seen == [[1, 1], [2, 2], [1, 3], [2, 1]]
    assert done == [[False, False], [True, False], [False, True], [True, False]]
    assert begun == [[1, 1], [0, 2], [1, 0], [0, 1]]


def test_reset_where_a_mask_says() -> None:
    env = GymEnv(lambda: Line(9), num_envs=2)
    td = env.step(env.rand_action(env.reset()))["next"]
    td["_reset"] = torch.tensor([[True], [False]])
    assert env.reset(td)["observation"].flatten().tolist() == [0, 1]


def test_seeding_is_a_reset_with_the_seed() -> None:
    env = GymEnv("CartPole-v1")
    assert env.set_seed(3) == next_seed(3)
    reference = gymnasium.make("CartPole-v1")
    reference.reset(seed=3)
    for _ in range(2):
        expected, _ = reference.reset()
        assert np.array_equal(env.reset()["observation"].numpy(), expected)


def test_every_environment_of_a_batch_has_its_own_seed() -> None:
    env = GymEnv("CartPole-v1", num_envs=3)
    after = env.set_seed(3)
    assert after == next_seed(next_seed(next_seed(3)))
    first, actions = env.reset()["observation"], env.rand_action()["action"]
    assert len({tuple(row) for row in first.tolist()}) == 3
    env.set_seed(3)
    assert torch.equal(env.reset()["observation"], first)
    assert torch.equal(env.rand_action()["action"], actions)


def test_close_closes_what_is_inside() -> None:
    line = Line()
    env = GymEnv(lambda: line)
    env.close()
    assert line.closed
    assert env.is_closed


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_envs is 0"):
        GymEnv("CartPole-v1", num_envs=0)
    with pytest.raises(TypeError, match="render_mode"):
        GymEnv(Line, render_mode="human")


@pytest.mark.timeout(60)
@pytest.mark.long
def test_without_gymnasium_the_message_says_what_to_type() -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from sync_collector.envs import CountingEnv, GymEnv\n"
        "CountingEnv().reset()\n"
        "GymEnv('CartPole-v1')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (
        "ImportError: GymEnv needs gymnasium; type: pip install 'sync-collector[gym]'"
        in result.stderr
    )


def test_counting_ends_each_environment_after_its_own_steps() -> None:
    env = CountingEnv([1, 2], num_envs=2, truncate=True)
    td = env.step(env.rand_action(env.reset()))
    assert td["next", "truncated"].flatten().tolist() == [True, False]
    assert not td["next", "terminated"].any()
    fresh = env.reset(TensorDict({"_reset": td["next", "done"]}, batch_size=[2]))
    assert fresh["observation"].flatten().tolist() == [0, 1]
