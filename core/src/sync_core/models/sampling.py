"""Samples of tensors: some of their bits, by which most changes are noticed at little cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

# The elements of a tensor that are looked at, evenly spread over it.
_SAMPLED = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, in one dimension."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(_INTEGERS[min(8, flat.element_size())]) if flat.numel() else flat


def samples(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return some of the bits of each tensor, always those of the same elements.

    A tensor that changed has another sample, unless only elements between those of the sample
    changed. Unlike torch's counter of changes, a sample shows what was written through ``.data`` or
    numpy, and a tensor that has taken the place of another. Of tensors on a GPU, all samples are
    copied to the host at once.

    Args:
        tensors: of any shapes, dtypes and devices.

    Example:
        >>> weight = torch.zeros(2, 2)
        >>> (before,) = samples([weight])
        >>> weight.data[1, 1] = 3
        >>> samples([weight]) == [before]
        False
    """
    found: list[Tensor] = []
    groups: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        flat = words(tensor)
        found.append(flat[:: max(1, flat.numel() // _SAMPLED)])
        groups[flat.device, flat.dtype].append(position)
    bits = [b""] * len(found)
    for positions in groups.values():
        together = torch.cat([found[i] for i in positions]).view(torch.uint8).cpu().numpy().data
        start = 0
        for i in positions:
            end = start + found[i].nbytes
            bits[i] = bytes(together[start:end])
            start = end
    return bits
