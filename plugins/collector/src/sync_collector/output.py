"""Processing of a batch before it is yielded or written to a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDictBase

from sync_collector.trajectories import split_trajectories


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
