"""Fingerprints of tensors, by which changes are noticed: of all bits, or of a sample of them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

# The elements of a tensor that a sample has, evenly spread over it.
_SAMPLED = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The words of 8 bytes that are reduced to one, and their bytes.
_ROW = 4096
_ROW_NBYTES = 8 * _ROW
# Rows that are reduced by one call: 256 KB stay in a core's cache (35 ms of CPU for 100 MB, 58 with
# 32 KB); on a GPU, fewer calls are faster.
_ROWS, _ROWS_ELSEWHERE = 8, 2048
_NBYTES = 16


def fingerprints(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return a fingerprint of each tensor's bits: those of different bits differ.

    A change is missed with a likelihood of about 2**-32, unless it was made to be missed. The same
    bits on another device have the same fingerprint. About 3 GB/s on one core of a CPU; of tensors
    on a GPU, what they are reduced to is copied to the host at once.

    Args:
        tensors: of any shapes, dtypes and devices.

    Example:
        >>> weight = torch.zeros(2, 2)
        >>> before = fingerprints([weight])
        >>> weight.data[1, 1] = 3
        >>> fingerprints([weight]) == before
        False
    """
    parts = _on_the_host(tensors, lambda tensor: _reduced(_flat(tensor).view(torch.uint8)))
    return [hashlib.blake2b(part, digest_size=_NBYTES).digest() for part in parts]


def samples(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return some of the bits of each tensor, always those of the same elements.

    Args:
        tensors: of any shapes, dtypes and devices.
    """

    def sample(tensor: Tensor) -> Tensor:
        words = _words(tensor)
        return words[:: max(1, words.numel() // _SAMPLED)].contiguous().view(torch.uint8)

    return _on_the_host(tensors, sample)


def _on_the_host(tensors: Sequence[Tensor], take: Callable[[Tensor], Tensor]) -> list[bytes]:
    """Return the bytes that a function takes of each tensor; one copy for each device."""
    taken = [take(tensor) for tensor in tensors]
    groups: defaultdict[torch.device, list[int]] = defaultdict(list)
    for position, part in enumerate(taken):
        groups[part.device].append(position)
    found = [b""] * len(taken)
    for positions in groups.values():
        together = torch.cat([taken[i] for i in positions]).cpu().numpy().data
        start = 0
        for i in positions:
            end = start + taken[i].numel()
            found[i] = bytes(together[start:end])
            start = end
    return found


def _reduced(data: Tensor) -> Tensor:
    """Return bytes that tell these apart from others: themselves, or a word for each row."""
    whole = data.numel() // _ROW_NBYTES * _ROW_NBYTES
    if not whole:
        return data
    words = data[:whole]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    return torch.cat([_products(words.view(torch.int64).view(-1, _ROW)), data[whole:]])


def _products(rows: Tensor) -> Tensor:
    """Return the product of each row with fixed odd factors, modulo 2**64, as bytes.

    A word's upper half is added to its lower half first: a factor does not mix the upper bits, so
    that two changed signs would cancel out.
    """
    factors = _factors(rows.device)
    on_cpu = rows.device.type == "cpu"
    size = _ROWS if on_cpu else _ROWS_ELSEWHERE
    found = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    mixed = torch.empty((min(size, len(rows)), _ROW), dtype=torch.int64, device=rows.device)
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        mix, out = mixed[: len(some)], found[first : first + size]
        torch.bitwise_right_shift(some, 32, out=mix)
        mix.add_(some)
        if on_cpu:
            torch.mv(mix, factors, out=out)
        else:
            # No GPU multiplies matrices of integers.
            torch.sum(mix.mul_(factors), 1, out=out)
    return found.view(torch.uint8)


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    """Return a factor for each word of a row."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator, device="cpu")
    return (factors | 1).to(device)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, in one dimension."""
    flat = _flat(tensor)
    return flat.view(_INTEGERS[min(8, flat.element_size())])
