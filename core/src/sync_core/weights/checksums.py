"""Checksums of tensors, by XXH3."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return the checksum of the bytes of some tensors; needs ``sync-core[verify]``.

    Example:
        >>> checksum([torch.ones(2, 3)]) == checksum([torch.ones(3, 2)])
        True
    """
    import xxhash

    state = xxhash.xxh3_64()
    for tensor in tensors:
        state.update(bytes_of(tensor))
    return state.intdigest()


def sums_to_tensor(sums: Sequence[int]) -> Tensor:
    """Return checksums as the tensor in which they travel."""
    return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))


def sums_from_tensor(tensor: Tensor) -> list[int]:
    """Return the checksums that travelled."""
    sums: list[int] = tensor.cpu().numpy().view(np.uint64).tolist()
    return sums


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, as something that hash functions take."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # The same as below, several times faster: a model may have thousands of small tensors.
        return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()
