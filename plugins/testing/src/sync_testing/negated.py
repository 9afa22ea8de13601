"""A layer that loses nothing and is easily seen: what travels is the weights' negative."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from sync_core import Update, hookimpl


class Negated:
    """Floating-point weights travel with the other sign; nothing else is changed."""

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        """Turn the signs."""
        update = yield
        update.replace([_negated(tensor) for tensor in update.tensors])
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update) -> Generator[None, Any, Any]:
        """Turn them back."""
        update.replace([_negated(tensor) for tensor in update.tensors])
        return (yield)


def _negated(tensor: Tensor) -> Tensor:
    # Arithmetic on the floats of one byte does not exist.
    return -tensor.detach() if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
