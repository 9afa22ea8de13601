"""Puts each trajectory of a batch into a row of its own."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """One row for each trajectory, padded with zeros to the length of the longest.

    Rows come in the order of the batch: environment after environment, each in the order of time.
    A trajectory that goes on in the next batch has a row in both, with the same id.

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
