"""The rewards and lengths of episodes in batches and in `stats()`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tests.collector.environments import ArrayCounting

from sync_collector import BatchOptions, Collector
from sync_collector.envs import CountingEnv
from sync_collector.episodes import EpisodeTotals

pytestmark = pytest.mark.timeout(60)


class Sampling(ArrayCounting):
    """Has random actions."""

    def sample_action(self) -> Any:
        return np.ones(1, np.float32)


class Buffer:
    """Keeps nothing."""

    def extend(self, batch: TensorDictBase) -> None:
        assert ("next", "episode_reward") in batch.keys(include_nested=True)


def test_totals_are_in_the_frame_with_which_an_episode_ends() -> None:
    with Collector(
        lambda: CountingEnv(3),
        lambda observation: observation + 1,
        scheme="thread",
        frames_per_batch=4,
        total_frames=8,
        batch=BatchOptions(episode_stats=True),
    ) as collector:
        first, second = collector
        stats = collector.stats()
    assert first["next", "episode_length"].flatten().tolist() == [1, 2, 3, 1]
    assert second["next", "episode_length"].flatten().tolist() == [2, 3, 1, 2]
    totals = torch.cat([b["next", "episode_reward"][b["next", "done"]] for b in (first, second)])
    rewards = torch.cat([b["next", "reward"].flatten() for b in (first, second)])
    assert totals.tolist() == [rewards[:3].sum(), rewards[3:6].sum()]
    assert (stats.episodes, stats.episode_length) == (2, 3.0)
    assert stats.episode_reward == totals.mean()
    assert stats.frames_per_second > 0


def test_batches_have_no_more_keys_unless_asked_for() -> None:
    with Collector(CountingEnv, scheme="none", frames_per_batch=8) as collector:
        keys = next(collector).keys(include_nested=True)
        assert ("next", "episode_reward") not in keys
        assert collector.stats().episodes == 0
        assert math.isnan(collector.stats().episode_reward)


@pytest.mark.parametrize("env", [Sampling, CountingEnv], ids=["arrays", "tensordicts"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers_per_collector": 2},
        {"split_trajs": True},
        {"max_frames_per_traj": 2},
        {"reset_at_each_iter": True},
        {"replay_buffer": Buffer()},
        {"replay_buffer": Buffer(), "extend_in_workers": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_stats_of_every_kind_of_batch(env: Any, options: dict[str, Any]) -> None:
    in_workers = options.pop("extend_in_workers", False)
    with Collector(
        lambda: env(4),
        scheme="none",
        frames_per_batch=6,
        total_frames=24,
        batch=BatchOptions(episode_stats=True, extend_in_workers=in_workers),
        **options,
    ) as collector:
        for _ in collector:
            pass
        stats = collector.stats()
    length = 2 if "max_frames_per_traj" in options else 4
    whole = 4 if "reset_at_each_iter" in options else 24 // length
    whole -= 2 * ("num_workers_per_collector" in options and 12 % length > 0)
    assert (stats.frames, stats.episodes) == (24, whole)
    assert stats.episode_length == length


def test_sums_continue_from_a_saved_state() -> None:
    def make() -> Collector:
        return Collector(
            lambda: CountingEnv(5),
            scheme="none",
            frames_per_batch=3,
            batch=BatchOptions(episode_stats=True),
        )

    with make() as one:
        next(one)
        state = one.state_dict()
        expected = [next(one)["next", "episode_length"].flatten().tolist() for _ in range(2)]
    with make() as other:
        other.load_state_dict(state)
        found = [next(other)["next", "episode_length"].flatten().tolist() for _ in range(2)]
        assert other.stats().episodes == 1
    assert found == expected == [[4, 5, 1], [2, 3, 4]]
    with make() as seeded:
        next(seeded)
        seeded.set_seed(0)
        assert next(seeded)["next", "episode_length"].flatten().tolist() == [1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=8))
def test_sums_are_those_of_a_loop(rows: list[list[bool]]) -> None:
    ended = torch.tensor(rows)  # [environments, time]
    reward = torch.from_numpy(np.random.default_rng(0).normal(size=(len(rows), 4, 1))).float()
    reward[0, 0] = math.inf
    totals, expected = EpisodeTotals(["reward"]), torch.zeros(len(rows), 4, 1)
    for row, ends in enumerate(rows):
        total = 0.0
        for t, end in enumerate(ends):
            total += float(reward[row, t])
            expected[row, t] = total
            total = 0.0 if end else total
    halves = [
        totals.add({"reward": reward[:, part]}, ended[:, part])["episode_reward"]
        for part in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(torch.cat(halves, 1), expected)
