"""States of tensors, by which changes are noticed at little cost: place, counter, and some bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from sync_core.models import place_of

# The elements of a tensor that are looked at, evenly spread over it.
_SAMPLED = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorState:
    """The state of a tensor, equal to a later one's unless the tensor has changed.

    Two states with other samples differ. Where the tensor lies elsewhere, or torch has counted a
    change, the sums of all bits are compared; else the tensor is taken for unchanged. So a write
    that torch does not count, through ``.data`` or numpy, goes unnoticed only where it leaves every
    element of the sample as it was.

    Args:
        tensor: the tensor; kept until the first comparison that needs its sum, or `settle`.
        sample: of `states`.
    """

    __slots__ = ("_sample", "_tensor", "_total", "_where")

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Tensor, sample: bytes) -> None:
        counter = 0 if tensor.is_inference() else tensor._version
        self._where = place_of(tensor), counter
        self._sample = sample
        self._tensor: Tensor | None = tensor
        self._total = 0

    @property
    def total(self) -> int:
        """The sum of all bits, as it was when it was first asked for."""
        if self._tensor is not None:
            self._total, self._tensor = total(self._tensor), None
        return self._total

    def settle(self) -> None:
        """Sum all bits now, for comparisons after the tensor has changed."""
        self.total  # noqa: B018 - computes it

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorState):
            return NotImplemented
        if self._sample != other._sample:
            return False
        if self._where == other._where:
            return True
        return self.total == other.total


def states(tensors: Sequence[Tensor]) -> list[TensorState]:
    """Return the state of each tensor; those that are kept must be settled.

    Of tensors on a GPU, all samples are copied to the host at once.

    Args:
        tensors: of any shapes, dtypes and devices.

    Example:
        >>> weight = torch.zeros(2, 2)
        >>> (before,) = states([weight])
        >>> before.settle()
        >>> weight.data[1, 1] = 3
        >>> states([weight]) == [before]
        False
    """
    return list(map(TensorState, tensors, samples(tensors)))


def total(tensor: Tensor) -> int:
    """Return the sum of the bits of a tensor, as integers."""
    found = _words(tensor)
    if not found.numel():
        return 0
    if found.nbytes % 8 == 0:
        # Ten times as fast as integers that have to be widened. The same sum wherever it lies.
        aligned = found if found.data_ptr() % 8 == 0 else found.clone()
        if aligned.storage_offset() * aligned.element_size() % 8:
            aligned = aligned.clone()
        found = aligned.view(torch.int64)
    return int(found.sum(dtype=torch.int64))


def samples(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return some of the bits of each tensor, always those of the same elements."""
    found: list[Tensor] = []
    groups: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        flat = _words(tensor)
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


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, in one dimension."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(_INTEGERS[min(8, flat.element_size())]) if flat.numel() else flat
