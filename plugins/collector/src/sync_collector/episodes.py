"""Numbers trajectories, and sums the rewards and lengths of episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from sync_collector.loops import Leaves

#: The range of trajectory ids per seat: seat ``i`` numbers from ``i`` times this.
PER_WORKER = 1 << 32


class TrajectoryIds:
    """Numbers the trajectories of a worker's environments.

    Args:
        seat: the worker's seat, which no other worker has or had.

    Example:
        >>> ids = TrajectoryIds(0)
        >>> ids.label(torch.tensor([False, True, False]))
        tensor([0, 0, 1])
        >>> ids.label(torch.tensor([True, False, False]))
        tensor([1, 2, 2])
    """

    def __init__(self, seat: int) -> None:
        self._next = seat * PER_WORKER
        self._current: Tensor | None = None

    def restart(self) -> None:
        """Begin a new trajectory in every environment with the next batch."""
        self._current = None

    def state_dict(self) -> dict[str, Any]:
        """Return the ids used so far."""
        return {"next": self._next, "current": self._current}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._next, self._current = state["next"], state["current"]

    def label(self, done: Tensor) -> Tensor:
        """Return the trajectory ids of a batch's frames.

        Args:
            done: the frames after which a trajectory ended; time is the last dimension.
        """
        envs = done.reshape(-1, done.shape[-1])
        if self._current is None:
            self._current = self._next + torch.arange(len(envs), device=done.device)
            self._next += len(envs)
        # Ids grow in the order of time, so the largest id so far in a row is its newest.
        ordinal = envs.T.flatten().cumsum(0).reshape(envs.T.shape).T
        begun = torch.where(envs, self._next - 1 + ordinal, 0)
        ids = torch.cat([self._current.unsqueeze(1), begun], 1).cummax(1).values
        self._current = ids[:, -1].clone()
        self._next += int(envs.sum())
        return ids[:, :-1].reshape(done.shape)


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """Return one row per trajectory, padded with zeros to the longest one.

    Rows are ordered by environment, then by time. A trajectory that continues in the next batch has
    a row in both, with the same id.

    Args:
        batch: frames with ``("collector", "traj_ids")``; time is the last dimension.

    Returns:
        A TensorDict of the shape ``[trajectories, longest]`` without named dimensions;
        ``("collector", "mask")`` is True for real frames.

    Example:
        >>> from tensordict import TensorDict
        >>> ids = torch.tensor([4, 4, 5])
        >>> frames = {"reward": torch.ones(3), "collector": {"traj_ids": ids}}
        >>> rows = split_trajectories(TensorDict(frames, batch_size=[3]))
        >>> rows["reward"].tolist(), rows["collector", "mask"].tolist()
        ([[1.0, 1.0], [1.0, 0.0]], [[True, True], [True, False]])
    """
    frames = batch.reshape(-1)
    ids = frames["collector", "traj_ids"]
    _, lengths = ids.unique_consecutive(return_counts=True)
    shape = torch.Size([len(lengths), int(lengths.max())])
    row = torch.arange(shape[0], device=ids.device).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    column = torch.arange(len(ids), device=ids.device) - first[row]

    def rows_of(values: Tensor) -> Tensor:
        padded = values.new_zeros(*shape, *values.shape[1:])
        padded[row, column] = values
        return padded

    frames["collector", "mask"] = torch.ones_like(ids, dtype=torch.bool)
    rows = frames.apply(rows_of, batch_size=shape)
    assert rows is not None
    rows.names = [None, None]
    return rows


#: The key, under ``"next"``, of the number of steps in an episode so far.
EPISODE_LENGTH = "episode_length"

# The number of episodes in the means.
_RECENT = 100


class EpisodeTotals:
    """Adds up the rewards and steps of episodes, including episodes over several batches.

    Args:
        reward_keys: the keys of rewards in the outcome of a step.

    Example:
        >>> totals, ended = EpisodeTotals(["reward"]), torch.tensor([False, True, False])
        >>> of_batch = totals.add({"reward": torch.ones(3, 1)}, ended)
        >>> of_batch["episode_reward"].flatten(), of_batch["episode_length"].flatten()
        (tensor([1., 2., 1.]), tensor([1, 2, 1]))
        >>> totals.add({"reward": torch.ones(3, 1)}, ended)["episode_reward"].flatten()
        tensor([2., 3., 1.])
    """

    def __init__(self, reward_keys: Sequence[Any]) -> None:
        self._reward_keys = tuple(reward_keys)
        self.restart()

    def restart(self) -> None:
        """Begin a new episode in every environment with the next batch."""
        # By key, of the shape [environments, values].
        self._before: dict[Any, np.ndarray[Any, Any]] = {}

    def state_dict(self) -> dict[Any, np.ndarray[Any, Any]]:
        """Return the sums of the unfinished episodes."""
        return dict(self._before)

    def load_state_dict(self, state: dict[Any, np.ndarray[Any, Any]]) -> None:
        """Continue from these sums."""
        self._before = dict(state)

    def add(self, outcome: Leaves, ended: Tensor) -> Leaves:
        """Return the totals of each frame's episode up to that frame, by key.

        Args:
            outcome: the outcomes of a batch of steps, by key.
            ended: the frames with which an episode ended; time is the last dimension.
        """
        ends = ended.reshape(-1, ended.shape[-1]).cpu().numpy()
        totals = {}
        for key in self._reward_keys:
            if key in outcome:
                reward = outcome[key]
                values = reward.detach().cpu().numpy().reshape(*ends.shape, -1)
                summed = torch.from_numpy(self._summed(key, values, ends)).to(reward)
                totals[_episode_key(key)] = summed.reshape(reward.shape)
        lengths = torch.from_numpy(self._summed(EPISODE_LENGTH, np.ones((*ends.shape, 1)), ends))
        totals[EPISODE_LENGTH] = lengths.reshape(*ended.shape, 1).to(ended.device, torch.int64)
        return totals

    def _summed(
        self, key: Any, values: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        sums = values.astype(np.float64)
        if key in self._before:
            sums[:, 0] += self._before[key]
        for row, ends_of_row in zip(sums, ends, strict=True):
            for episode in np.split(row, np.flatnonzero(ends_of_row) + 1):
                np.cumsum(episode, axis=0, out=episode)
        self._before[key] = np.where(ends[:, -1:], 0.0, sums[:, -1])
        return sums


@dataclass(frozen=True, slots=True)
class RecentEpisodes:
    """The rewards and lengths of the last episodes.

    Args:
        count: the number of all episodes that have ended.
        rewards: the total reward of each of the last 100.
        lengths: the number of steps of each of the last 100.
    """

    count: int = 0
    rewards: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()

    def with_batch(self, batch: TensorDictBase) -> Self:
        """Return a copy with the episodes that ended in a batch added."""
        found = totals_of(batch)
        if found is None or not found.ended.any():
            return self
        rewards = found.reward[found.ended].tolist()
        lengths = found.length[found.ended].tolist()
        return type(self)(
            self.count + len(rewards),
            (*self.rewards, *rewards)[-_RECENT:],
            (*self.lengths, *lengths)[-_RECENT:],
        )

    @property
    def mean_reward(self) -> float:
        """The mean total reward; NaN before the first episode has ended."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else math.nan

    @property
    def mean_length(self) -> float:
        """The mean number of steps; NaN before the first episode has ended."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else math.nan


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """The totals of each frame's episode, in the shape of the batch.

    Args:
        ended: whether the episode ended with the frame.
        reward: the episode's reward up to the frame; with several agents, the mean of their
            rewards.
        length: the episode's steps up to the frame.
    """

    ended: Tensor
    reward: Tensor
    length: Tensor


def totals_of(batch: TensorDictBase) -> BatchTotals | None:
    """Return the totals in a batch; None if it was made without ``episode_stats``."""
    following = batch.get("next", None)
    if following is None or following.get(EPISODE_LENGTH, None) is None:
        return None
    keys = list(following.keys(include_nested=True, leaves_only=True))
    rewards = [key for key in keys if _last(key).startswith("episode_") and key != EPISODE_LENGTH]
    flags = ["done"] if "done" in keys else [key for key in keys if _last(key) == "done"]
    if not rewards:
        return None
    dims = batch.ndim
    ended = [following[key].flatten(dims).any(-1) for key in flags]
    # The rewards of agents, whose keys begin with the agent's name.
    alike = [key for key in rewards if _last(key) == _last(rewards[0])]
    return BatchTotals(
        ended=torch.stack(ended).any(0),
        reward=torch.stack([following[key].flatten(dims).mean(-1) for key in alike]).mean(0),
        length=following[EPISODE_LENGTH].squeeze(-1),
    )


def select_totals(batch: TensorDictBase) -> TensorDictBase:
    """Return the part of a batch that `totals_of` reads."""
    keys = batch.keys(include_nested=True, leaves_only=True)
    return batch.select(
        *(
            key
            for key in keys
            if key[0] == "next" and (key[-1] == "done" or key[-1].startswith("episode_"))
        )
    )


def _episode_key(reward_key: Any) -> Any:
    """Return the key of a reward's sum in TorchRL's ``RewardSum``."""
    if isinstance(reward_key, str):
        return f"episode_{reward_key}"
    return (*reward_key[:-1], f"episode_{reward_key[-1]}")


def _last(key: Any) -> str:
    name: str = key if isinstance(key, str) else key[-1]
    return name
