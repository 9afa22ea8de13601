"""`info_keys=`: entries of Gymnasium's info in batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics
from tests.collector.gym_envs import Count

from sync_collector import Collector
from sync_collector.envs import ArraySpec, CountingEnv, GymEnv
from sync_core import RemoteCallError

pytestmark = pytest.mark.timeout(60)


class Informed(gymnasium.Env[Any, Any]):
    """Counts steps, and says in ``info`` what it counts; the last step has one entry more."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self._length, self._count = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._count = 0
        return self._seen()

    def step(self, action: Any) -> Any:
        self._count += 1
        observation, info = self._seen()
        done = self._count == self._length
        if done:
            info["episode"] = {"l": self._count}
        return observation, 1.0, done, False, info

    def _seen(self) -> Any:
        info: dict[str, Any] = {"tenfold": 10.0 * self._count, "pair": np.arange(2) + self._count}
        return np.array([self._count], np.float32), info


KEYS = {
    "tenfold": "float32",
    "pair": ArraySpec((2,), np.dtype(np.int64)),
    ("episode", "l"): "int32",
}


def vector(mode: AutoresetMode, *, as_list: bool = False) -> Any:
    made = SyncVectorEnv([Informed] * 2, autoreset_mode=mode)
    return DictInfoToList(made) if as_list else made


@pytest.mark.parametrize(
    "env",
    [
        Informed,
        *(
            partial(vector, mode, as_list=as_list)
            for mode in AutoresetMode
            for as_list in (False, True)
        ),
    ],
)
def test_entries_are_those_of_their_frame(env: Callable[[], Any]) -> None:
    with Collector(env, scheme="none", frames_per_batch=10, info_keys=KEYS) as collector:
        batch = next(collector)
    following = batch["next"]
    assert torch.equal(batch["tenfold"], 10 * batch["observation"].squeeze(-1))
    assert torch.equal(following["tenfold"], 10 * following["observation"].squeeze(-1))
    count = following["observation"].to(torch.int64)
    assert torch.equal(following["pair"], torch.cat([count, count + 1], -1))
    assert torch.equal(
        following["episode", "l"], torch.where(following["done"].squeeze(-1), 3, 0).int()
    )


def test_a_policy_is_not_given_them_for_its_observation() -> None:
    def policy(x: torch.Tensor) -> torch.Tensor:
        assert x.shape == (1,)
        return torch.tensor([1, 0])

    options: dict[str, Any] = {"max_frames_per_traj": 2, "info_keys": ["tenfold", "unknown"]}
    with Collector(Informed, policy, scheme="none", frames_per_batch=4, **options) as collector:
        batch = next(collector)
    assert batch["next", "tenfold"].tolist() == [10.0, 20.0, 10.0, 20.0]
    assert batch["next", "unknown"].isnan().all()
    assert batch["step_count"].flatten().tolist() == [0, 1, 0, 1]


def test_statistics_of_gymnasiums_wrapper() -> None:
    def make() -> GymEnv:
        return GymEnv(
            lambda: gymnasium.wrappers.RecordEpisodeStatistics(Informed(), stats_key="totals"),
            info_keys=[("totals", "r")],
            num_envs=2,
        )

    with Collector(make, scheme="none", frames_per_batch=12) as collector:
        batch = next(collector)
    assert batch["next", "totals", "r"][batch["next", "done"].squeeze(-1)].tolist() == [3.0] * 4


class Lists(VectorWrapper):
    """Gives a list of infos; that of Gymnasium 1.1 does not know entries with one mask for all."""

    def reset(self, **given: Any) -> Any:
        observation, infos = self.env.reset(**given)
        return observation, self._listed(infos)

    def step(self, actions: Any) -> Any:
        *rest, infos = self.env.step(actions)
        return (*rest, self._listed(infos))

    def _listed(self, infos: dict[str, Any]) -> list[dict[str, Any]]:
        def of(i: int, values: Any) -> Any:
            return {k: v[i] for k, v in values.items()} if isinstance(values, dict) else values[i]

        return [
            {
                name: of(i, infos[name])
                for name in infos
                if f"_{name}" in infos and infos[f"_{name}"][i]
            }
            for i in range(self.num_envs)
        ]


@pytest.mark.parametrize("wrap", [lambda env: env, Lists])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_statistics_of_gymnasiums_wrapper_of_vectors(mode: AutoresetMode, wrap: Any) -> None:
    def make() -> Any:
        made = SyncVectorEnv([lambda: Count(2), lambda: Count(3)], autoreset_mode=mode)
        return wrap(RecordEpisodeStatistics(made, stats_key="totals"))

    keys = [("totals", "l")]
    with Collector(make, scheme="none", frames_per_batch=12, info_keys=keys) as collector:
        batch = next(collector)
    lengths = batch["next", "totals", "l"]
    expected = torch.tensor([[torch.nan, 2.0] * 3, [torch.nan, torch.nan, 3.0] * 2])
    assert torch.equal(lengths.isnan(), expected.isnan())
    # In 1.1, the wrapper forgets the first step after an episode that ended within a step.
    first = slice(0, 3) if mode is AutoresetMode.SAME_STEP else slice(None)
    assert torch.equal(lengths[:, first].nan_to_num(), expected[:, first].nan_to_num())
    # A frame that an episode begins with has none of the one before it.
    begins = batch["observation"].squeeze(-1) == 0
    assert batch["totals", "l"][begins].isnan().all()


@pytest.mark.parametrize(
    ("env", "keys", "message"),
    [
        (Informed, ["observation"], "name of something else"),
        (Informed, ["done"], "name of something else"),
        (Informed, ["pair"], r"array\(\[0, 1\]\) for 'pair', not a float32 of the shape \(\)"),
        (Informed, {"tenfold": "float33"}, "give a dtype"),
        (CountingEnv, ["tenfold"], r"info_keys is for .* a CountingEnv without configure"),
    ],
)
def test_what_cannot_be_recorded(env: Any, keys: Any, message: str) -> None:
    with (
        pytest.raises(RemoteCallError, match=message),
        Collector(env, scheme="none", frames_per_batch=4, info_keys=keys) as collector,
    ):
        next(collector)
