"""Checks that a model's tensors are unchanged, for code that copies bytes over them."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

_kind = operator.attrgetter("dtype", "shape")


class Tensors:
    """The tensors of a model, with their recorded dtypes, shapes and addresses.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = list(model.parameters())
        self._known = self._current()

    def check(self) -> None:
        """Raise an error if a dtype, shape or address has changed."""
        if self._current() != self._known or not all(map(Tensor.is_contiguous, self._tensors)):
            raise RuntimeError("a tensor has changed")

    def count_write(self) -> None:
        """Notify autograd of a write to the tensors."""
        increment_version(self._tensors)

    def _current(self) -> list[object]:
        return [*map(_kind, self._tensors), *map(Tensor.data_ptr, self._tensors)]
