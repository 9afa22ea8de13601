"""Warns who trains a policy and forgets to send it to the workers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sync_collector.several import SeveralModels
from sync_collector.weights import PolicyWeights


class StaleWatch:
    """Compares the trainer's models with what they were when the workers got their copies.

    Writes that torch counts are seen, as those of most optimizers are, and new memory; in-place
    writes to a tensor's ``.data``, and those of optimizers with ``fused=True``, are not.

    Args:
        weights: tells of updates.
        models: the trainer's models of which workers have copies.
    """

    def __init__(self, weights: PolicyWeights | SeveralModels, models: Mapping[str, Any]) -> None:
        self._models = models
        self._known: list[tuple[int, int]] | None = _state(self._models)
        weights.on_update.append(self._updated)

    def look(self) -> None:
        """Warn if the models have changed and no worker was ever sent weights; once."""
        if self._known is None or self._known == _state(self._models):
            return
        self._known = None
        warnings.warn(
            "the policy has changed and the workers still act with the copies that they began "
            "with; type collector.update_policy_weights_() after every training step, or "
            "Collector(…, update_after_each_batch=True)",
            stacklevel=5,
        )

    def restored(self, version: int) -> None:
        """Compare with the models as they are now, after a state was loaded.

        Args:
            version: the version in that state; above 0, weights were sent, and no warning follows.
        """
        if self._known is not None:
            self._known = None if version else _state(self._models)

    def _updated(self, worker_ids: Sequence[int]) -> None:
        if worker_ids:
            self._known = None


def _state(models: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for model in models.values()
        if isinstance(model, nn.Module)
        for tensor in (*model.parameters(), *model.buffers())
    ]
