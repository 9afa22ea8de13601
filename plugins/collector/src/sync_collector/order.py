"""What a worker is asked for with each batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One batch.

    Args:
        random: act at random, not by the policy.
        version: the version of the weights that it is to be made with, or a newer one.
        patience: how long these are waited for, in seconds.
    """

    random: bool = False
    version: int = 0
    patience: float = 0.0
