"""Weights of one tensor, of values that every dtype of a case can hold."""

from __future__ import annotations

import torch
from torch import Tensor


def eighths(seed: int) -> Tensor:
    """Small multiples of 1/8, which every floating-point dtype of 16 bits can hold."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, (12,), generator=generator) / 8


def matrix(value: int, dtype: torch.dtype) -> Tensor:
    """A small matrix of one value, of any dtype."""
    return torch.full((5, 3), float(value)).to(dtype)
