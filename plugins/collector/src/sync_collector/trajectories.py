"""Numbers trajectories: no two of them alike, whichever worker, whenever."""

from __future__ import annotations

from typing import Any

import torch
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
