"""The batches of one worker: their layout, and calls of policies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tests.collector.environments import ArrayCounting
from torch import Tensor, nn

from sync_collector import Collector
from sync_collector.array_loop import ArrayLoop
from sync_collector.envs import CountingEnv, GymEnv
from sync_collector.episodes import PER_WORKER
from sync_collector.loops import TensorDictLoop
from sync_collector.rollout import Rollout, RolloutOptions
from sync_collector.testing import Scale

FLOAT, BOOL, INT = torch.float32, torch.bool, torch.int64


class ByTensorDict(ArrayCounting):
    """The same, but for a method that a collector must not go past."""

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        return super().step(tensordict)


ENVS: list[Callable[..., Any]] = [CountingEnv, ArrayCounting, ByTensorDict]


def rollout(env: Any, policy: Any = None, frames: int = 10, worker_id: int = 0) -> Rollout:
    return Rollout(env, policy, worker_id, RolloutOptions(frames_per_batch=frames))


def joined(made: Rollout, dim: int = 0) -> TensorDictBase:
    batches: Any = [made.collect(), made.collect()]
    result: Any = torch.cat(batches, dim)
    assert isinstance(result, TensorDictBase)
    return result


def layout(tensordict: TensorDictBase) -> dict[Any, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        key: (value.dtype, tuple(value.shape))
        for key, value in tensordict.items(include_nested=True, leaves_only=True)
    }


def expected_layout(
    batch: tuple[int, ...], observation: int, action: tuple[torch.dtype, int]
) -> dict[Any, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        "observation": (FLOAT, (*batch, observation)),
        "action": (action[0], (*batch, action[1])),
        "done": (BOOL, (*batch, 1)),
        "terminated": (BOOL, (*batch, 1)),
        "truncated": (BOOL, (*batch, 1)),
        "policy_version": (INT, batch),
        ("next", "observation"): (FLOAT, (*batch, observation)),
        ("next", "reward"): (FLOAT, (*batch, 1)),
        ("next", "done"): (BOOL, (*batch, 1)),
        ("next", "terminated"): (BOOL, (*batch, 1)),
        ("next", "truncated"): (BOOL, (*batch, 1)),
        ("next", "policy_version"): (INT, batch),
        ("collector", "traj_ids"): (INT, batch),
    }


@pytest.mark.parametrize("num_envs", [None, 2])
def test_layout_of_cartpole(num_envs: int | None) -> None:
    batch = rollout(GymEnv("CartPole-v1", num_envs=num_envs), frames=12).collect()
    shape = (12,) if num_envs is None else (2, 6)
    assert batch.batch_size == torch.Size(shape)
    assert batch.names == ["time"] if num_envs is None else [None, "time"]
    assert batch["next"].names == batch.names
    assert batch.device is None
    assert layout(batch) == expected_layout(shape, 4, (INT, 2))


def test_layout_of_pendulum() -> None:
    batch = rollout(GymEnv("Pendulum-v1"), frames=12).collect()
    assert batch.names == ["time"]
    assert layout(batch) == expected_layout((12,), 3, (FLOAT, 1))


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("num_envs", [None, 2])
def test_layout_of_counting(env: Callable[..., Any], num_envs: int | None) -> None:
    batch = rollout(env(3, num_envs=num_envs), Scale(), frames=12).collect()
    shape = (12,) if num_envs is None else (2, 6)
    assert layout(batch) == expected_layout(shape, 1, (FLOAT, 1))


def test_without_versions() -> None:
    options = RolloutOptions(frames_per_batch=3, track_policy_version=False)
    batch = Rollout(CountingEnv(), None, 0, options).collect()
    assert "policy_version" not in batch
    assert "policy_version" not in batch["next"]


@pytest.mark.parametrize("env", ENVS)
def test_episodes_go_on_over_batches(env: Callable[..., Any]) -> None:
    made = rollout(env(3), Scale(2.0), frames=4)
    batch = joined(made)
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert batch["next", "observation"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert batch["next", "done"].flatten().tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    assert batch["next", "reward"].flatten().tolist() == [2.0] * 8
    assert not batch["done"].any()
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("env", ENVS)
def test_each_environment_of_a_batch_is_reset_by_itself(env: Callable[..., Any]) -> None:
    made = rollout(env([2, 3], num_envs=2), Scale(), frames=8, worker_id=1)
    batch = joined(made, dim=1)
    assert batch["observation"].squeeze(-1).tolist() == [
        [0, 1, 0, 1, 0, 1, 0, 1],
        [0, 1, 2, 0, 1, 2, 0, 1],
    ]
    assert batch["next", "observation"].squeeze(-1).tolist() == [
        [1, 2, 1, 2, 1, 2, 1, 2],
        [1, 2, 3, 1, 2, 3, 1, 2],
    ]
    ids = batch["collector", "traj_ids"] - PER_WORKER
    assert ids.tolist() == [[0, 0, 2, 2, 4, 4, 5, 5], [1, 1, 1, 3, 3, 3, 6, 6]]


def test_truncation_is_told_from_termination() -> None:
    env = CountingEnv(2, truncate=True)
    batch = rollout(env, frames=4).collect()
    assert batch["next", "truncated"].flatten().tolist() == [False, True, False, True]
    assert torch.equal(batch["next", "truncated"], batch["next", "done"])
    assert not batch["next", "terminated"].any()


def test_both_loops_gather_the_same() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)

    def policy(observation: Tensor) -> Tensor:
        return nn.functional.one_hot(net(observation).argmax(-1), 2)

    for num_envs in (None, 2):
        env = GymEnv("CartPole-v1", num_envs=num_envs)
        batches = []
        for loop in (ArrayLoop(env), TensorDictLoop(env)):
            made = rollout(env, policy, frames=60)
            assert isinstance(made._loop, ArrayLoop)
            made._loop = loop
            made.set_seed(5)
            batches.append(joined(made, dim=-1))
        assert batches[0]["next", "done"].any()
        assert (batches[0] == batches[1]).all()


def test_a_method_that_is_overridden_is_called() -> None:
    class Doubled(GymEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            super().step(tensordict)["next", "reward"] *= 2
            return tensordict

    batch = rollout(Doubled("CartPole-v1"), frames=3).collect()
    assert batch["next", "reward"].flatten().tolist() == [2.0, 2.0, 2.0]


def test_restarting_begins_new_trajectories() -> None:
    made = rollout(CountingEnv(100), frames=3)
    first = made.collect()
    assert made.set_seed(40) == 41
    second = made.collect()
    assert second["observation"].flatten().tolist() == [40, 41, 42]
    assert first["collector", "traj_ids"].tolist() == [0, 0, 0]
    assert second["collector", "traj_ids"].tolist() == [1, 1, 1]


class TakesTensorDict(Scale):
    def forward(self, td: TensorDictBase) -> TensorDictBase:  # type: ignore[override, unused-ignore]
        td["extra"] = td["observation"] + 1
        td["observation"] = td["observation"] * 10
        return td.set("action", super().forward(td["observation"]))


class Annotated(Scale):
    def forward(self, x: TensorDict) -> TensorDictBase:  # type: ignore[override, unused-ignore]
        return x.set("action", super().forward(x["observation"]))


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize(
    "policy",
    [
        Scale(2.0),
        Annotated(2.0),
        TensorDictModule(Scale(2.0), in_keys=["observation"], out_keys=["action"]),
        nn.Sequential(Scale(2.0)),
        lambda observation: torch.full_like(observation, 2.0),
        lambda x: torch.full_like(x, 2.0),
        lambda td: td.set("action", torch.full_like(td["observation"], 2.0)),
        lambda tensordict: tensordict.set("action", tensordict["observation"] * 0 + 2),
    ],
)
def test_kinds_of_policies(env: Callable[..., Any], policy: Any) -> None:
    batch = rollout(env(3), policy, frames=4).collect()
    assert batch["action"].flatten().tolist() == [2.0] * 4
    assert not batch["action"].requires_grad


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("num_envs", [None, 2])
def test_what_a_policy_sets_is_recorded(env: Callable[..., Any], num_envs: int | None) -> None:
    batch = rollout(env(2, num_envs=num_envs), TakesTensorDict(3.0), frames=4).collect()
    assert torch.equal(batch["observation"] / 10 + 1, batch["extra"])
    assert batch["extra"].flatten()[:2].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("env", ENVS)
def test_what_a_policy_sets_under_next_is_carried_over(env: Callable[..., Any]) -> None:
    def remember(td: TensorDictBase) -> TensorDictBase:
        memory = td.get("memory", torch.zeros(1))
        td["memory"] = memory
        td["next", "memory"] = memory + 1
        return td.set("action", memory)

    batch = rollout(env(3), remember, frames=7).collect()
    assert batch["memory"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch["next", "memory"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]


def remember(td: TensorDictBase) -> TensorDictBase:
    memory = td.get("memory", torch.zeros(*td.batch_size, 1))
    td["memory"] = memory
    td["next"] = TensorDict({"memory": memory + 1}, td.batch_size)
    return td.set("action", memory)


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("limit", [-1, 4])
@pytest.mark.parametrize("lengths", [[3, 3], [3, 5]])
def test_what_is_carried_over_ends_with_each_episode(
    env: Callable[..., Any], limit: int, lengths: list[int]
) -> None:
    options = RolloutOptions(frames_per_batch=20, max_frames_per_traj=limit)
    made = Rollout(env(lengths, num_envs=2), remember, 0, options)
    for _ in range(2):
        batch = made.collect()
        assert torch.equal(batch["memory"], batch["observation"])


@pytest.mark.parametrize("limit", [-1, 3])
def test_what_a_policy_keeps_at_the_root_stays(limit: int) -> None:
    class Mine(CountingEnv):
        """Its steps give no root, so that the collector makes it."""

    def count(td: TensorDictBase) -> TensorDictBase:
        td["calls"] = td.get("calls", torch.zeros(2, 1)) + 1
        return td.set("action", td["calls"])

    options = RolloutOptions(frames_per_batch=8, max_frames_per_traj=limit)
    batch = Rollout(Mine([2, 9], num_envs=2), count, 0, options).collect()
    assert batch["calls"][..., 0].tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_policy_may_return_what_it_has_set_alone(
    env: Callable[..., Any], num_envs: int | None
) -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"action": td["observation"] + 1}, td.batch_size)

    batch = rollout(env(3, num_envs=num_envs), act, frames=8).collect()
    assert torch.equal(batch["action"], batch["observation"] + 1)


@pytest.mark.parametrize("env", ENVS)
def test_an_observation_may_be_set_anew_in_another_form(env: Callable[..., Any]) -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        td["observation"] = td["observation"].double().expand(2) / 4
        return td.set("action", torch.zeros(1))

    batch = rollout(env(9), act, frames=3).collect()
    assert batch["observation"].tolist() == [[0.0, 0.0], [0.25, 0.25], [0.5, 0.5]]
    assert batch["observation"].dtype == torch.float64
    assert batch["next", "observation"].dtype == torch.float32


@pytest.mark.parametrize("env", ENVS)
def test_a_policy_that_was_interrupted_begins_again_with_the_observation(
    env: Callable[..., Any],
) -> None:
    calls = itertools.count()

    def act(td: TensorDictBase) -> TensorDictBase:
        td["observation"] = 10 * td["observation"] + 1
        if next(calls) == 2:
            raise KeyboardInterrupt
        return td.set("action", torch.zeros(1))

    made = rollout(env(9), act, frames=4)
    with pytest.raises(KeyboardInterrupt):
        made.collect()
    assert made.collect()["observation"].flatten().tolist() == [1, 11, 21, 31]


@pytest.mark.parametrize("env", ENVS)
def test_what_begins_with_an_underscore_is_not_recorded(env: Callable[..., Any]) -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        td["_own"] = td["nested", "_own"] = torch.zeros(1)
        return td.set("action", torch.zeros(1))

    batch = rollout(env(9), act, frames=3).collect()
    assert layout(batch) == expected_layout((3,), 1, (FLOAT, 1))


@pytest.mark.parametrize("env", ENVS)
def test_what_is_no_tensor_is_an_error(env: Callable[..., Any]) -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        td["text"] = NonTensorData("left", batch_size=td.batch_size)
        return td.set("action", torch.zeros(1))

    with pytest.raises(TypeError, match=r"'text' is a NonTensorData; .*tensors only"):
        rollout(env(9), act).collect()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_policies_of_torchscript_and_torch_compile() -> None:
    scripted = torch.jit.script(Scale(2.0))
    module = TensorDictModule(scripted, in_keys=["observation"], out_keys=["action"])
    options: dict[str, Any] = {"scheme": "thread", "workers": "inline", "frames_per_batch": 2}
    with Collector(CountingEnv, module, **options) as collector:
        assert next(collector)["action"].flatten().tolist() == [2.0, 2.0]
        scripted.weight.data.fill_(5.0)
        collector.update_policy_weights_()
        assert next(collector)["action"].flatten().tolist() == [5.0, 5.0]
    with pytest.raises(TypeError, match=r"does not say what it takes .*TensorDictModule"):
        rollout(CountingEnv(), torch.jit.trace(Scale(2.0), torch.zeros(1)))
    compiled = torch.compile(
        TensorDictModule(Scale(3.0), in_keys=["observation"], out_keys=["action"]), backend="eager"
    )
    assert rollout(CountingEnv(), compiled, frames=1).collect()["action"].item() == 3.0


@pytest.mark.parametrize("env", ENVS)
def test_a_policy_may_reuse_its_tensors(env: Callable[..., Any]) -> None:
    action = torch.zeros(1)
    batch = rollout(env(9), lambda observation: action.add_(1), frames=4).collect()
    assert batch["action"].flatten().tolist() == [1, 2, 3, 4]


def test_arguments_with_defaults_take_what_they_are_named_after() -> None:
    def with_gap(observation: Tensor, memory: Any = None, step_count: Any = None) -> Any:
        assert memory is None
        return observation + 10 * step_count

    def by_name(*, observation: Tensor, step_count: Any = 5) -> Any:
        return with_gap(observation, step_count=step_count)

    def under_another_name(x: Tensor, step_count: Any = 5) -> Any:
        return with_gap(x, step_count=step_count)

    def all_have_defaults(observation: Any = None, step_count: Any = 5) -> Any:
        return with_gap(observation, step_count=step_count)

    options = RolloutOptions(frames_per_batch=3, max_frames_per_traj=2)
    for policy in (with_gap, by_name, under_another_name, all_have_defaults):
        for env in ENVS:
            batch = Rollout(env(9), policy, 0, options).collect()
            assert batch["action"].flatten().tolist() == [0, 11, 0], policy
    given: Any = partial(all_have_defaults, step_count=torch.tensor([7]))
    batch = Rollout(CountingEnv(9), given, 0, options).collect()
    assert batch["action"].flatten().tolist() == [70, 71, 70]


def test_names_that_are_no_observations() -> None:
    with pytest.raises(TypeError, match=r"takes 'a', 'b', .* observes 'observation'.*in_keys"):
        rollout(CountingEnv(), lambda a, b: a + b)
    with pytest.raises(TypeError, match="takes nothing"):
        rollout(CountingEnv(), lambda: torch.zeros(1))


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda observation: None, "returned a NoneType, not the action"),
        (lambda td: None, "given a TensorDict and returned a NoneType"),
    ],
)
def test_what_a_policy_must_return(env: Callable[..., Any], policy: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        rollout(env(3), policy).collect()


def test_keys_and_dtypes_must_stay() -> None:
    steps = iter(range(10))

    def sometimes(td: TensorDictBase) -> TensorDictBase:
        if next(steps) == 2:
            td["extra"] = torch.zeros(1)
        return td.set("action", torch.zeros(1))

    with pytest.raises(
        ValueError, match=r"have the key 'extra' and others lack it.* must set 'extra' itself"
    ):
        rollout(CountingEnv(), sometimes).collect()

    def changing(observation: Tensor) -> Tensor:
        return torch.zeros(1, dtype=torch.float64 if observation.item() else torch.float32)

    with pytest.raises(ValueError, match=r"'action' is torch.float32 .* torch.float64"):
        rollout(CountingEnv(), changing).collect()


def test_random_actions_need_a_way() -> None:
    class Bare:
        batch_size = torch.Size()

        def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
            return TensorDict({"done": torch.zeros(1, dtype=torch.bool)}, batch_size=[])

        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"Bare has neither rand_action\(td\) nor action_spec"):
        rollout(Bare()).collect()
    with pytest.raises(TypeError, match=r"Bare has no set_seed\(\)"):
        rollout(Bare()).set_seed(0)
    with pytest.raises(NotImplementedError, match=r"ArrayCounting has no sample_action\(\)"):
        rollout(ArrayCounting(3)).collect()


def test_the_environment_is_closed_once() -> None:
    env = CountingEnv()
    made = rollout(env)
    made.close()
    assert env.is_closed
    env.is_closed = False
    made.close()
    assert not env.is_closed
    del made

    forgotten = rollout(env)
    del forgotten
    assert env.is_closed
