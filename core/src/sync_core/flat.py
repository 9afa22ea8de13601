"""A module's tensors side by side in memory, laid out like a payload, so a commit is one copy."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sync_core.layout import Layout

# Below this, one copy is no faster than one for each tensor.
_WORTHWHILE = 1 << 20
# A tensor's own reference to its storage, and the Python object that the question is asked by.
_EXCLUSIVE = 2


class Flat:
    """The memory that some tensors were moved to.

    A C library copies hundreds of megabytes in one go past the caches, which is up to twice as
    fast as tensor by tensor; and thousands of small tensors cost no more than their bytes.
    """

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        # A copy is several times slower when its target lies a little after its source within
        # the page, so the tensors lie in their pages as they do in a payload, after its header.
        start = len(layout.header) % mmap.PAGESIZE
        memory = mmap.mmap(-1, start + layout.body_nbytes)
        self._layout = layout
        self._bytes = np.frombuffer(memory, dtype=np.uint8, offset=start)
        for spec, tensor in zip(layout.specs, tensors, strict=True):
            if not spec.nbytes:
                continue
            # A storage of its own for each, so that saving one tensor does not save them all.
            place = torch.frombuffer(
                memory, dtype=torch.uint8, offset=start + spec.offset, count=spec.nbytes
            )
            moved = place.view(spec.dtype).view(spec.shape)
            moved.copy_(tensor.data)
            tensor.data = moved
        self._pointers = _pointers(tensors)

    @classmethod
    def gather(cls, layout: Layout, named: Mapping[str, Tensor]) -> Self | None:
        """Move tensors together, if nobody can notice: nothing else may view their memory.

        A tensor keeps its identity; only the address of its elements changes. Views of it, numpy
        arrays or aliases such as a `state_dict` would go on looking at the old memory, so where
        there are any, or memory is shared or not on the CPU, nothing is moved.
        """
        if layout.body_nbytes < _WORTHWHILE or not all(map(_can_move, named.values())):
            return None
        return cls(layout, [named[spec.name] for spec in layout.specs])

    def holds(self, layout: Layout, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are all where they were moved to."""
        return layout == self._layout and _pointers(tensors) == self._pointers

    def write(self, tensors: Sequence[Tensor], body: Tensor) -> None:
        """Copy the body of a payload of the same layout over all of them."""
        np.copyto(self._bytes, body.numpy())
        # What autograd has saved for a backward pass has changed, as with any in-place copy.
        increment_version(tensors)


def _pointers(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _can_move(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_shared()
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _references(tensor) == _EXCLUSIVE
    )


def _references(tensor: Tensor) -> int:
    # torch has no public name for it; https://github.com/pytorch/pytorch/pull/99698 added it for
    # CUDA graphs, which ask the same question.
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
