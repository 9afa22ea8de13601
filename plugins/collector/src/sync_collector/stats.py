"""Statistics of a collector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectorStats:
    """Counters of a collector.

    Args:
        frames: frames delivered.
        batches: batches delivered.
        version: the newest version of the policy; 0 before the first update.
        lag: how many versions the oldest policy that acted in the last batch was behind the
            newest one, when the batch was delivered.
        mean_lag: the same, on average over the batches delivered.
        max_lag: the largest such number of all batches.
        sync_seconds: how long the last `update_policy_weights_` took, from the call to the last
            worker's acknowledgement; 0.0 before the first. One with ``blocking=False``, and one
            that were automatic count only for what the caller waited.
    """

    frames: int = 0
    batches: int = 0
    version: int = 0
    lag: int = 0
    mean_lag: float = 0.0
    max_lag: int = 0
    sync_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of batches behind the newest version: the last one, the sum, the maximum."""

    last: int = 0
    total: int = 0
    most: int = 0

    def counted(self, lag: int) -> Lag:
        """Return the counts with one more batch."""
        return Lag(lag, self.total + lag, max(self.most, lag))
