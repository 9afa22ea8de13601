"""Gathers what every step gave, and stacks it once in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

Leaves: TypeAlias = dict[Any, Tensor]


def leaves_of(tensordict: TensorDictBase) -> Leaves:
    """The tensors of a TensorDict by key, without what is under ``"next"``.

    Raises:
        TypeError: an entry that is not a tensor.
    """
    leaves: Leaves = {}
    items = tensordict.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    for key, value in items:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{key!r} is a {type(value).__name__}; a collector gathers tensors only, so leave "
                "it out, or give its number"
            )
        if isinstance(key, str) or key[0] != "next":
            leaves[key] = value
    return leaves


def recorded_of(tensordict: TensorDictBase) -> Leaves:
    """Return the leaves of a batch, private ones (with an underscore) apart."""
    leaves = leaves_of(tensordict)
    return {key: tensor for key, tensor in leaves.items() if not _is_private(key)}


@lru_cache(maxsize=1024)
def _is_private(key: str | tuple[str, ...]) -> bool:
    return any(name.startswith("_") for name in ((key,) if isinstance(key, str) else key))


def copy_of(leaves: Leaves) -> Leaves:
    """The tensors of one step, to be kept: the next step may overwrite the originals."""
    return {key: tensor.clone() for key, tensor in leaves.items()}


class Copies:
    """Copies of the tensors of steps, each tensor once.

    The next step begins with the result of the last one: often the very same tensors.

    Example:
        >>> copies, given = Copies(), {"observation": torch.zeros(1)}
        >>> copies.of(given)["observation"] is copies.again(given)["observation"]
        True
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Tensor, int, Tensor]] = {}

    def of(self, leaves: Leaves) -> Leaves:
        """The tensors that a step gave, to be kept."""
        copies = copy_of(leaves)
        self._made = {
            key: (tensor, tensor._version, copies[key])
            for key, tensor in leaves.items()
            if not tensor.is_inference()
        }
        return copies

    def again(self, leaves: Leaves) -> Leaves:
        """The tensors that the next step begins with; those already copied are not again."""
        return {key: self._again(key, tensor) for key, tensor in leaves.items()}

    def _again(self, key: Any, tensor: Tensor) -> Tensor:
        original, version, copy = self._made.get(key, (None, 0, tensor))
        return copy if original is tensor and tensor._version == version else tensor.clone()


def stack(rows: Sequence[Leaves], dim: int) -> Leaves:
    """The tensors of all steps, with a dimension for time.

    Raises:
        ValueError: keys, shapes or dtypes differ between steps.
    """
    first = rows[0] if rows else {}
    for row in rows:
        if row.keys() != first.keys():
            key = min(row.keys() ^ first.keys(), key=str)
            raise ValueError(
                f"some steps of a batch have the key {key!r} and others lack it; environment and "
                "policy must give the same keys in every step"
            )
    return {key: _stack(key, [row[key] for row in rows], dim) for key in first}


def _stack(key: Any, column: list[Tensor], dim: int) -> Tensor:
    first = column[0]
    for tensor in column:
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            raise ValueError(
                f"{key!r} is {first.dtype} of shape {tuple(first.shape)} in one step and "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} in another"
            )
    return torch.stack(column, dim)
