"""Values that a declared space cannot hold are refused; all others arrive as they are."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collector.gym_envs import collect

from sync_collector.envs import ArrayEnv, ArraySpec, GymEnv
from sync_collector.envs.adapt import as_env, stack_envs
from sync_collector.envs.spaces import codec
from sync_collector.envs.vector import VectorGymEnv

pytestmark = pytest.mark.timeout(60)

SPACES = [
    spaces.Box(0, 255, (2,), np.uint8),
    spaces.Box(-9, 9, (2,), np.int64),
    spaces.Box(-9, 9, (2,), np.float32),
    spaces.MultiBinary(2),
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiDiscrete([3, 4], start=[5, -1]),
]
# All are exact in float32.
NUMBERS = st.integers(-300, 600) | st.integers(-3000, 3000).map(lambda n: n / 8)
KINDS = ["single", "dict", "several", "vector", "tensordict"]


class Given(gymnasium.Env[Any, Any]):
    """Observes one value, and notes its actions."""

    def __init__(self, space: Any, value: Any, *, nested: bool = False) -> None:
        self.observation_space = spaces.Dict({"a": space}) if nested else space
        self.action_space, self._nested, self._value = space, nested, value
        self.actions: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return self._seen(), 0.0, False, False, {}

    def _seen(self) -> Any:
        return {"a": self._value} if self._nested else self._value


class Vector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Two of them that are stepped as one, as a simulator does."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    num_envs = 2

    def __init__(self, env: Given) -> None:
        self._env = env
        self.single_action_space = self.single_observation_space = env.action_space
        self.action_space = self.observation_space = gymnasium.vector.utils.batch_space(
            env.action_space, 2
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.stack([self._env.reset()[0]] * 2), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._env.actions += list(actions)
        no = np.zeros(2, np.bool_)
        return self.reset()[0], np.zeros(2), no, no, {}


def made_of(env: Given, kind: str, *, categorical: bool) -> Any:
    if kind == "vector":
        return VectorGymEnv(Vector(env), categorical=categorical)
    number = 2 if kind == "several" else None
    return GymEnv(lambda: env, num_envs=number, categorical=categorical)


def first_observed(env: Given, kind: str, *, categorical: bool) -> list[Any]:
    made = made_of(env, kind, categorical=categorical)
    key = "a" if kind == "dict" else "observation"
    if kind == "tensordict":
        frame = made.reset()
    elif made.batch_size:
        frame = collect(made, None, 2)[0, 0]
    else:
        frame = collect(made, None, 1)[0]
    observed: list[Any] = frame[key].flatten().tolist()
    return observed


def as_given(space: Any, value: Any, form: str) -> Any:
    values = value if space.shape else value[0]
    if form == "list":
        return values
    return np.array(values, form)


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", SPACES, ids=str)
@settings(max_examples=20, deadline=None)
@given(value=st.tuples(NUMBERS, NUMBERS), form=st.sampled_from(["list", "float32", "int64"]))
def test_an_observation_is_recorded_as_it_is_or_refused(
    space: Any, kind: str, categorical: bool, value: Any, form: str
) -> None:
    if form == "int64":
        value = tuple(map(int, value))
    value_ = as_given(space, list(value), form)
    held = np.asarray(value_).astype(space.dtype)
    fits = np.array_equal(held, value_)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        fits = fits and space.contains(held if space.shape else int(held))
    env = Given(space, value_, nested=kind == "dict")
    if not fits:
        with pytest.raises(TypeError) as raised:
            first_observed(env, kind, categorical=categorical)
        assert str(space) in str(raised.value) or "Discrete(" in str(raised.value)
        assert "observation" in str(raised.value)
        return
    seen = first_observed(env, kind, categorical=categorical)
    expected = np.asarray(value_).reshape(-1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        sizes = np.reshape(getattr(space, "nvec", getattr(space, "n", 0)), -1)
        starts = np.broadcast_to(np.reshape(space.start, -1), sizes.shape)
        indices = [int(v - start) for v, start in zip(expected, starts, strict=True)]
        rows = [np.eye(n)[i] for n, i in zip(sizes, indices, strict=True)]
        expected = np.array(indices) if categorical else np.concatenate(rows)
    assert seen == expected.tolist()


@pytest.mark.parametrize("kind", ["single", "several", "vector"])
@pytest.mark.parametrize("space", SPACES, ids=str)
@settings(max_examples=20, deadline=None)
@given(value=st.tuples(NUMBERS, NUMBERS), dtype=st.sampled_from([torch.float32, torch.int64]))
def test_an_action_arrives_as_it_is_or_is_refused(
    space: Any, kind: str, value: Any, dtype: torch.dtype
) -> None:
    env = Given(space, space.sample())
    action = torch.tensor(value if space.shape else value[0], dtype=dtype)
    made = made_of(env, kind, categorical=True)
    value_ = action if kind == "single" else torch.stack([action] * 2)
    start = getattr(space, "start", 0)
    held = (action.numpy() + start).astype(space.dtype)
    discrete = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    fits = np.array_equal(held, action.numpy() + start)
    if discrete or isinstance(space, spaces.MultiBinary):
        fits = fits and space.contains(held if space.shape else int(held))
    if discrete and dtype.is_floating_point:
        fits = False
    if fits:
        made.step_arrays(value_.numpy())
        assert np.array_equal(env.actions[0], held)
        return
    with pytest.raises(TypeError, match=r"action") as raised:
        made.step_arrays(value_.numpy())
    assert str(space) in str(raised.value) or "categorical action" in str(raised.value)
    assert not env.actions


class Arrays(ArrayEnv):
    """An environment of arrays whose flags are at least as wrong as its observation."""

    array_specs = {"observation": ArraySpec((1,), np.dtype(np.uint8))}

    def __init__(self, seen: float, flag: Any = False) -> None:
        self._seen, self._flag = seen, flag

    def reset_arrays(self, mask: Any = None) -> Any:
        return {"observation": np.zeros(1)}

    def step_arrays(self, action: Any) -> Any:
        return {"observation": np.full(1, self._seen)}, 0.0, self._flag, False

    def sample_action(self) -> Any:
        return np.zeros(1)


def test_an_environment_of_arrays_keeps_to_its_specs() -> None:
    assert collect(Arrays(3.0), None, 1)["next", "observation"].tolist() == [[3]]
    with pytest.raises(TypeError, match=r"'observation' was observed with 0.5 \(float64\), and"):
        collect(Arrays(0.5), None, 1)
    for env in (Arrays(0, None), stack_envs([Arrays(0, None)] * 2)):
        with pytest.raises(TypeError, match=r"gave None for terminated or truncated"):
            collect(env, None, 1)


@pytest.mark.parametrize("value", [[1j, 1], [None, 1.0], ["1", "2"]], ids=str)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_value_that_is_not_a_real_number_is_refused(value: Any, kind: str) -> None:
    env = Given(spaces.Box(-9, 9, (2,), np.float32), np.array(value), nested=kind == "dict")
    with pytest.raises(TypeError, match=r"was observed with .*\((complex128|object|<U1)\)"):
        first_observed(env, kind, categorical=False)


def test_a_value_of_another_shape_is_named() -> None:
    env = Given(spaces.Box(-9, 9, (2,), np.float32), np.zeros((2, 1)))
    with pytest.raises(TypeError, match=r"observed with the shape \(2, 1\), and .* \(2,\)"):
        first_observed(env, "single", categorical=False)


@pytest.mark.parametrize("flag", [None, "no", [True, False], 0.5, 2, float("nan")], ids=str)
def test_a_flag_is_true_or_false(flag: Any) -> None:
    class Ends(Given):
        def step(self, action: Any) -> Any:
            seen, reward, _, truncated, info = super().step(action)
            return seen, reward, flag, truncated, info

    env = Ends(spaces.Discrete(4), 0)
    for number in (None, 2):
        made = GymEnv(lambda: env, num_envs=number)
        with pytest.raises(TypeError, match=r"for 'terminated'; let its step\(\) return True or"):
            collect(made, None, 2)


class Odd(Vector):
    """Gives a reward and a flag that are neither numbers nor True or False."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        seen, reward, over, cut, info = super().step(actions)
        return seen, self.reward or reward, self.flags or over, cut, info

    reward: Any = None
    flags: Any = None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": [1j, 1]}, "gave the reward"),
        ({"reward": [None, 1]}, "gave the reward"),
        ({"flags": [0.5, 0]}, "for 'terminated'"),
        ({"flags": [2, 0]}, "for 'terminated'"),
    ],
    ids=str,
)
def test_rewards_and_flags_of_a_vector_are_numbers(given: Any, message: str) -> None:
    odd: Any = type("Of", (Odd,), given)
    made = VectorGymEnv(odd(Given(spaces.Box(-9, 9, (2,), np.float32), np.zeros(2))))
    with pytest.raises(TypeError, match=message):
        collect(made, None, 4)


@pytest.mark.parametrize("flag", [np.bool_(True), torch.tensor([True]), 1, np.ones(1)], ids=str)
def test_a_flag_of_numpy_or_torch_is_one(flag: Any) -> None:
    class Ends(Given):
        def step(self, action: Any) -> Any:
            seen, reward, _, truncated, info = super().step(action)
            return seen, reward, flag, truncated, info

    batch = collect(GymEnv(lambda: Ends(spaces.Discrete(4), 0)), None, 2)
    assert batch["next", "terminated"].all()


class Simulator(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Three environments that count to 5, as a simulator on a GPU steps them: with tensors."""

    num_envs = 3
    single_observation_space: Any = spaces.Box(-1e6, 1e6, (2,), np.float32)
    single_action_space: Any = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, mode: AutoresetMode, *, final: bool = True, nested: bool = False) -> None:
        self.metadata = {"autoreset_mode": mode}
        self._mode, self._final, self._nested = mode, final, nested
        if nested:
            self.single_observation_space = spaces.Dict({"a": Simulator.single_observation_space})
        batch = gymnasium.vector.utils.batch_space
        self.observation_space = batch(self.single_observation_space, 3)
        self.action_space = batch(self.single_action_space, 3)

    def _seen(self) -> Any:
        seen = torch.stack([self._steps, 10 * self._steps], 1)
        return {"a": seen} if self._nested else seen

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        begin = torch.tensor([0.0, 1, 2])
        where = torch.as_tensor((options or {}).get("reset_mask", np.ones(3, np.bool_)))
        self._steps = torch.where(where, begin, getattr(self, "_steps", begin))
        return self._seen(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert isinstance(actions, torch.Tensor)
        self._steps = self._steps + 1
        over, last, info = self._steps >= 5, self._seen(), {}
        reward = self._steps.clone()
        if self._mode is AutoresetMode.SAME_STEP:
            self._steps[over] = 0
            info = {"final_obs": last, "_final_obs": over} if self._final else {}
        return self._seen(), reward, over, over & False, info


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_simulator_of_tensors(mode: AutoresetMode, nested: bool) -> None:
    batch = collect(as_env(Simulator(mode, nested=nested)), None, 21)
    seen = batch["next", "a" if nested else "observation"]
    assert seen[0, :, 0].tolist() == [1, 2, 3, 4, 5, 1, 2]
    assert batch["next", "reward"][0, :, 0].tolist() == seen[0, :, 0].tolist()
    assert batch["next", "terminated"][0, :, 0].tolist() == [False] * 4 + [True] + [False] * 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_lost_last_observation_is_said(nested: bool) -> None:
    env = as_env(Simulator(AutoresetMode.SAME_STEP, final=False, nested=nested))
    with pytest.warns(UserWarning, match=r"without info\['final_obs'\].*the observation before"):
        batch = collect(env, None, 36)
    key = "a" if nested else "observation"
    assert batch[key][0, :, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    # The observation before stands for the one that was lost.
    assert batch["next", key][0, :, 0].tolist() == [1, 2, 3, 4, 4, 1, 2, 3, 4, 4, 1, 2]


class Bare:
    """A simulator of tensors that is like Gymnasium's vectors, and of none of its classes."""

    def __init__(self) -> None:
        self._inner = Simulator(AutoresetMode.SAME_STEP)
        self.num_envs = 3
        self.single_observation_space = self._inner.single_observation_space
        self.single_action_space = self._inner.single_action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._inner.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        *made, info = self._inner.step(actions)
        # As it was called before Gymnasium 1.0.
        return (*made, {"final_observation": info["final_obs"]})


def test_a_simulator_with_the_least_members_resets_in_the_same_step() -> None:
    env: Any = as_env(Bare())
    assert env.set_seed(0) != 0
    seen = collect(env, None, 21)["next", "observation"]
    assert seen[0, :, 0].tolist() == [1, 2, 3, 4, 5, 1, 2]
    env.close()


def test_an_info_entry_keeps_its_value() -> None:
    class Infos(Given):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"x": 0.5})

    env = GymEnv(lambda: Infos(spaces.Discrete(4), 0), info_keys={"x": "int64"})
    with pytest.raises(TypeError, match=r"info has 0.5 for 'x', not a int64"):
        collect(env, None, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, np.array([1, 2])])
@pytest.mark.parametrize("categorical", [False, True])
def test_what_is_no_index_is_refused_by_the_name_of_its_space(
    value: Any, *, categorical: bool
) -> None:
    made = codec(spaces.Discrete(4), categorical=categorical)
    with pytest.raises(TypeError, match=r"is not in the space Discrete\(4\)"):
        made.encode(value)


@settings(deadline=None)
@given(
    n=st.integers(1, 300),
    start=st.integers(-300, 300),
    value=st.integers(-300, 300),
    dtype=st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int64]),
)
def test_indices_are_counted_from_the_start_in_any_dtype(
    n: int, start: int, value: int, dtype: Any
) -> None:
    observed = np.array([value]).astype(dtype)
    value = int(observed[0])
    for space in (spaces.Discrete(n, start=start), spaces.MultiDiscrete([n], start=[start])):
        made = codec(space, categorical=True)
        values = observed if isinstance(space, spaces.Discrete) else observed[None]
        if start <= value < start + n:
            assert made.encode_batch(values).ravel().tolist() == [value - start]
        else:
            with pytest.raises(TypeError, match="is not in the space"):
                made.encode_batch(values)
