"""Numbers trajectories, so that no two of a collector are alike, and splits batches by them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

#: The worker in seat ``i`` numbers its trajectories from ``i`` times this on.
PER_WORKER = 1 << 32


class TrajectoryIds:
    """The trajectory that each environment of a worker is in.

    Args:
        seat: the number of the worker's place, which no other worker has or had.

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
        """Every environment begins a new trajectory with the next batch."""
        self._current = None

    def state_dict(self) -> dict[str, Any]:
        """The ids given so far."""
        return {"next": self._next, "current": self._current}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._next, self._current = state["next"], state["current"]

    def label(self, done: Tensor) -> Tensor:
        """The ids of a batch's frames.

        Args:
            done: after which frames a trajectory ended; time is its last dimension.
        """
        envs = done.reshape(-1, done.shape[-1])
        if self._current is None:
            self._current = self._next + torch.arange(len(envs))
            self._next += len(envs)
        # Ids grow in the order of time, so that the newest in a row is the largest so far.
        ordinal = envs.T.flatten().cumsum(0).reshape(envs.T.shape).T
        begun = torch.where(envs, self._next - 1 + ordinal, 0)
        ids = torch.cat([self._current.unsqueeze(1), begun], 1).cummax(1).values
        self._current = ids[:, -1].clone()
        self._next += int(envs.sum())
        return ids[:, :-1].reshape(done.shape)


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """One row for each trajectory, padded with zeros to the length of the longest.

    Rows come in the order of the batch: environment after environment, each in the order of time.
    A trajectory that continues in the next batch has a row in both, with the same id.

    Args:
        batch: frames with ``("collector", "traj_ids")``; time is the last dimension.

    Returns:
        A TensorDict of the shape ``[trajectories, longest]`` with no named dimension, in which
        ``("collector", "mask")`` says which frames are real.

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
