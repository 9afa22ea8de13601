"""The request for one batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One batch.

    Args:
        number: tells this batch from the one before it; the same where Ctrl-C came before that one
            was delivered. None for a batch that is never asked for again.
        random: act at random, not by the policy.
        version: the least version of the weights for the batch.
        patience: how long these are waited for, in seconds.
    """

    number: int | None = None
    random: bool = False
    version: int = 0
    patience: float = 0.0
