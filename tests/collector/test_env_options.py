"""Policies that return indices, options that a collector gives its environments, and masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers.vector import DictInfoToList
from torch import Tensor

from sync_collector import Collector
from sync_collector.envs import CountingEnv, GymEnv
from sync_core import RemoteCallError

pytestmark = pytest.mark.timeout(60)
collect = partial(Collector, scheme="none", frames_per_batch=12)


class Doors(gymnasium.Env[Any, Any]):
    """Ends after some steps; in step i, only the actions i % n and the last one are allowed."""

    def __init__(self, space: Any = None, *, in_info: bool = False, length: int = 5) -> None:
        self._length = length
        self.action_space = spaces.Discrete(4, start=3) if space is None else space
        self.observation_space: Any = spaces.Box(0, 9, (1,), np.float32)
        self._in_info = in_info
        if not in_info:
            mask = spaces.MultiBinary(4)
            self.observation_space = spaces.Dict(count=self.observation_space, mask=mask)

    def _mask(self) -> Any:
        return np.array([i in (self._count % 4, 3) for i in range(4)], np.int8)

    def _observed(self) -> Any:
        count = np.full(1, self._count, np.float32)
        info = {"mask": self._mask(), "number": self._count}
        return (count, info) if self._in_info else ({"count": count, "mask": self._mask()}, info)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._count = 0
        return self._observed()

    def step(self, action: Any) -> Any:
        self.taken = action
        self._count += 1
        observation, info = self._observed()
        return observation, float(np.sum(action)), self._count == self._length, False, info


def _vector(number: int, **options: Any) -> Any:
    return gymnasium.vector.SyncVectorEnv([partial(Doors, **options)] * number)


@pytest.mark.parametrize(
    ("act", "shape"),
    [
        (lambda count: torch.tensor(2), ()),
        (lambda count: torch.tensor([2]), (1,)),
        (lambda count: torch.tensor([0, 0, 1, 0]), (4,)),
        (lambda count: torch.tensor(2, dtype=torch.int32), ()),
    ],
)
def test_actions_are_as_the_policy_gives_them(act: Any, shape: tuple[int, ...]) -> None:
    with collect(partial(Doors, in_info=True), act) as made:
        batch = next(made)
    assert batch["action"].shape == (12, *shape)
    assert batch["next", "reward"].unique().tolist() == [5.0]


@pytest.mark.parametrize("make", [partial(_vector, 3, in_info=True), partial(GymEnv, num_envs=3)])
def test_indices_of_several_environments(make: Any) -> None:
    if make.func is GymEnv:
        make = partial(make, partial(Doors, in_info=True))

    def act(observation: Tensor) -> Tensor:
        return torch.arange(len(observation))

    with collect(make, act) as made:
        batch = next(made)
    assert batch["action"].tolist() == [[i] * 4 for i in range(3)]
    assert batch["next", "reward"].squeeze(-1).tolist() == [[i + 3.0] * 4 for i in range(3)]


@pytest.mark.parametrize("action", [torch.tensor([1, 2]), torch.tensor([0, 1, 0, 0, 1])])
def test_indices_of_several_actions(action: Tensor) -> None:
    make = partial(Doors, spaces.MultiDiscrete([2, 3]), in_info=True)
    with collect(make, lambda observation: action) as made:
        assert next(made)["next", "reward"].unique().tolist() == [3.0]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.tensor(4), r"action 4 is not in the space Discrete\(4, start=3\)"),
        (torch.tensor(2.0), "must be one-hot, 4 numbers with a single 1, not 2.0; .* an integer"),
        (torch.tensor([2, 3]), r"must be one-hot, .*not \[2, 3\]"),
    ],
)
def test_actions_of_neither_kind(action: Tensor, message: str) -> None:
    with (
        collect(partial(Doors, in_info=True), lambda observation: action) as made,
        pytest.raises(RemoteCallError, match=message),
    ):
        next(made)


def test_random_frames_and_indices() -> None:
    options: dict[str, Any] = {"init_random_frames": 12}
    index = lambda observation: torch.tensor(2)  # noqa: E731
    with collect(lambda: Doors(in_info=True), index, **options) as made:
        assert next(made)["action"].shape == (12, 4)
        with pytest.raises(RemoteCallError, match=r"type Collector\(…, categorical=True\)"):
            next(made)
    with collect(lambda: Doors(in_info=True), index, categorical=True, **options) as made:
        assert [next(made)["action"].shape for _ in range(2)] == [(12,)] * 2


@pytest.mark.parametrize(
    "make",
    [lambda: GymEnv(Doors), Doors, partial(_vector, 2), partial(_vector, 2, in_info=True)],
)
@pytest.mark.parametrize("categorical", [None, True])
def test_options_of_any_environment(make: Any, categorical: Any) -> None:
    options = {"info_keys": {"number": "int64"}, "action_mask": "mask", "categorical": categorical}
    with collect(make, frames_per_batch=80, **options) as made:
        made.set_seed(0)
        batch = next(made).reshape(-1)
    actions = batch["action"] if categorical else batch["action"].argmax(-1)
    allowed = (actions == batch["number"] % 4) | (actions == 3)
    assert allowed.all()
    assert actions.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("in_info", [False, True])
def test_masks_of_environments_whose_infos_are_lists(*, in_info: bool) -> None:
    def make() -> Any:
        envs = [partial(Doors, in_info=in_info, length=length) for length in (2, 5)]
        return DictInfoToList(gymnasium.vector.SyncVectorEnv(envs))

    options: dict[str, Any] = {"info_keys": {"number": "int64"}, "frames_per_batch": 80}
    with collect(make, action_mask="mask", categorical=True, **options) as made:
        batch = next(made)
    assert ((batch["action"] == batch["number"] % 4) | (batch["action"] == 3)).all()


def test_a_mask_that_a_state_was_saved_with() -> None:
    with collect(Doors, action_mask="mask", frames_per_batch=7) as made:
        made.set_seed(0)
        next(made)
        state = made.state_dict()
        expected = next(made)["action"]
    with collect(Doors, action_mask="mask", frames_per_batch=7) as made:
        made.load_state_dict(state)
        assert torch.equal(next(made)["action"], expected)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Doors, {"action_mask": "legal"}, "'legal' is neither in the observation nor"),
        (
            lambda: Doors(spaces.MultiDiscrete([2, 3])),
            {"action_mask": "mask"},
            "is for Discrete actions",
        ),
        (CountingEnv, {"action_mask": "mask"}, r"CountingEnv without configure"),
        (
            lambda: GymEnv(Doors, categorical=False),
            {"categorical": True},
            "made with categorical=False, and the collector with True; leave out one",
        ),
    ],
)
def test_options_that_do_not_fit(make: Any, options: Any, message: str) -> None:
    with pytest.raises(RemoteCallError, match=message), collect(make, **options) as made:
        next(made)
