"""A lossless layer whose effect is easy to see: it sends the weights with opposite signs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from sync_core import Update, hookimpl


class Negated:
    """Sends floating-point weights with the opposite sign, and everything else unchanged."""

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        """Negate the weights."""
        update = yield
        update.replace([_negated(tensor) for tensor in update.tensors])
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update) -> Generator[None, Any, Any]:
        """Negate them back."""
        update.replace([_negated(tensor) for tensor in update.tensors])
        return (yield)


def _negated(tensor: Tensor) -> Tensor:
    # One-byte floats have no arithmetic.
    return -tensor.detach() if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
