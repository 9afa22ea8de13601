"""Gathers what every step gave, and stacks it once in a batch."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

Leaves: TypeAlias = dict[Any, Tensor]


class Columns:
    """A column of tensors for each key."""

    def __init__(self) -> None:
        self._columns: dict[Any, list[Tensor]] = {}
        self._steps = 0

    def append(self, leaves: Leaves) -> None:
        """Add the tensors of one step; they are copied, since a step may overwrite the last one's.

        Raises:
            ValueError: a key that other steps lack, or lacks one that they have.
        """
        columns = self._columns
        if not self._steps:
            columns.update((key, []) for key in leaves)
        elif leaves.keys() != columns.keys():
            key = min(leaves.keys() ^ columns.keys(), key=str)
            raise ValueError(
                f"some steps of a batch have the key {key!r} and others lack it; environment and "
                "policy must give the same keys in every step"
            )
        for key, tensor in leaves.items():
            columns[key].append(tensor.clone())
        self._steps += 1

    def stack(self, dim: int) -> Leaves:
        """The columns as tensors with a dimension for time.

        Raises:
            ValueError: shapes or dtypes differ between steps.
        """
        return {key: _stack(key, column, dim) for key, column in self._columns.items()}


def leaves_of(tensordict: TensorDictBase) -> Leaves:
    """The tensors of a TensorDict by key, without what is under ``"next"``.

    Raises:
        TypeError: an entry that is no tensor.
    """
    leaves: Leaves = {}
    for key, value in tensordict.items(include_nested=True, leaves_only=True):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{key!r} is a {type(value).__name__}; a collector gathers tensors only"
            )
        if isinstance(key, str) or key[0] != "next":
            leaves[key] = value
    return leaves


def _stack(key: Any, column: list[Tensor], dim: int) -> Tensor:
    first = column[0]
    for tensor in column:
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            raise ValueError(
                f"{key!r} is {first.dtype} of shape {tuple(first.shape)} in one step and "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} in another"
            )
    return torch.stack(column, dim)
