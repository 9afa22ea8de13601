"""One tensor of a layout: its name, its kind, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layout.

    Args:
        name: dotted name, as in a state_dict.
        dtype: its dtype.
        shape: its shape.
        offset: its first byte, counted from the start of the body.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
