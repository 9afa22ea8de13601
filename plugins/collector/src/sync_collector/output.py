"""Processing of a batch before it is yielded or written to a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor


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


class ReplayBuffer(Protocol):
    """Anything with `extend`; TorchRL's replay buffers have it."""

    def extend(self, batch: Any, /) -> Any:
        """Add what one worker has made: frames, or trajectories if the collector splits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The last steps of a batch, in the order of the arguments.

    Args:
        split_trajs: put each trajectory into its own row.
        postproc: changes the batch.
        replay_buffer: where the batch is written to; None to yield it.
        extend_in_workers: let the workers do all of that, which then deliver only how many frames
            they have made, and with which versions.
    """

    split_trajs: bool = False
    postproc: Callable[[TensorDictBase], Any] | None = None
    replay_buffer: ReplayBuffer | None = None
    extend_in_workers: bool = False

    def check_buffer(self) -> None:
        """Raise if there is no replay buffer, so that batches made in the background are lost."""
        if self.replay_buffer is None:
            raise RuntimeError(
                "batches that are made in the background are not taken; give the collector "
                "replay_buffer=…, or iterate over it"
            )

    def in_worker(self, made: TensorDictBase) -> TensorDictBase:
        """Return the part of a batch that a worker delivers after writing it."""
        self.write(made)
        return made.select("policy_version", strict=False)

    def written_by_driver(self, batch: TensorDictBase, *, of_all: bool) -> Sequence[TensorDictBase]:
        """Return the parts of a delivered batch to write, one after the other.

        Args:
            batch: the batch.
            of_all: whether its first dimension is that of the workers. Into a replay buffer goes
                what each of them has made, as if they had written it.
        """
        if self.replay_buffer is None or self.extend_in_workers:
            return []
        return batch.unbind(0) if of_all else [batch]

    def write(self, made: TensorDictBase) -> None:
        """Write what one worker has made into the replay buffer."""
        assert self.replay_buffer is not None
        _given("the replay buffer", self.replay_buffer.extend, self._finish(made))

    def yielded(self, batch: TensorDictBase) -> Any:
        """Return the batch to yield; None where it is written to a replay buffer."""
        return self._finish(batch) if self.replay_buffer is None else None

    def _finish(self, batch: TensorDictBase) -> Any:
        if self.split_trajs:
            batch = split_trajectories(batch)
        return batch if self.postproc is None else _given("postproc", self.postproc, batch)


def _given(name: str, function: Callable[[Any], Any], batch: Any) -> Any:
    """Return the result of the user's function for a batch."""
    try:
        return function(batch)
    except StopIteration as error:
        # It would end the loop over the collector as if all frames had been yielded.
        raise RuntimeError(f"{name} raised StopIteration, as next() does at an end") from error
