"""A module's tensors side by side in memory, laid out like a payload, so a commit copies bytes."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sync_core import pages
from sync_core.layout import Layout

# Below this, one copy is no faster than one for each tensor.
_WORTHWHILE = 1 << 20
# Past the caches, a copy is up to four times slower when its target lies so little after its source
# within the page; torch copies by way of the caches, and is slower otherwise.
_TOO_CLOSE = 704


class Flat:
    """The memory that some tensors were moved to.

    A C library copies hundreds of megabytes in one go past the caches, which is up to twice as
    fast as tensor by tensor; and thousands of small tensors cost no more than their bytes.
    """

    def __init__(self, layout: Layout, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self._tensors = [named[spec.name] for spec in layout.specs]
        # See _TOO_CLOSE: in a payload that begins with a page, the body begins after the header.
        start = len(layout.header) % mmap.PAGESIZE
        memory = pages.allocate(start + layout.body_nbytes)
        self._bytes = np.frombuffer(memory, dtype=np.uint8, offset=start)
        for spec, tensor in zip(layout.specs, self._tensors, strict=True):
            if not spec.nbytes:
                continue
            # A storage of its own for each, so that saving one tensor does not save them all.
            place = torch.frombuffer(
                memory, dtype=torch.uint8, offset=start + spec.offset, count=spec.nbytes
            )
            moved = place.view(spec.dtype).view(spec.shape)
            moved.copy_(tensor.data)
            tensor.data = moved
        self._pointers = self._current_pointers()

    @classmethod
    def gather(cls, layout: Layout, named: Mapping[str, Tensor]) -> Self | None:
        """Move tensors together, if nobody can notice: nothing else may view their memory.

        A tensor keeps its identity; only the address of its elements changes. Views of it, numpy
        arrays or aliases such as a `state_dict` would go on looking at the old memory, so where
        there are any, or memory is shared or not on the CPU, nothing is moved. An array that a
        tensor was made on (`torch.from_numpy`) is not seen: torch cannot tell such memory from
        that of a model that was unpickled or loaded from a file.
        """
        if layout.body_nbytes < _WORTHWHILE or not all(map(_can_move, named.values())):
            return None
        # Tensors pointed elsewhere in inference mode could not be trained any more.
        with torch.inference_mode(mode=False):
            return cls(layout, named)

    def write(self, named: Mapping[str, Tensor], bodies: Sequence[Tensor]) -> bool:
        """Copy the bytes of a payload of the same layout over all of the tensors.

        False, and nothing is written, when the model holds others by now or one was moved.

        Args:
            named: the model's tensors, whose dtypes and shapes are those of the layout.
            bodies: the bytes, in the stretches in which they lie.
        """
        if any(body.device.type != "cpu" for body in bodies):
            return False
        # The memory is ours, so a tensor that still begins where it was put lies in it.
        if named is not self._named or self._current_pointers() != self._pointers:
            return False
        if not all(map(Tensor.is_contiguous, self._tensors)):
            return False
        begin = 0
        for body in bodies:
            _copy_bytes(self._bytes[begin : begin + body.numel()], body)
            begin += body.numel()
        # What autograd has saved for a backward pass has changed, as with any in-place copy.
        increment_version(self._tensors)
        return True

    def _current_pointers(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))


def _copy_bytes(target: np.ndarray[Any, np.dtype[np.uint8]], source: Tensor) -> None:
    distance = (target.ctypes.data - source.data_ptr()) % mmap.PAGESIZE
    if 0 < distance < _TOO_CLOSE:
        torch.from_numpy(target).copy_(source)
    else:
        np.copyto(target, source.numpy())


def _can_move(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_shared()
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _references(tensor) == _EXCLUSIVE
        # An array made by DLPack holds the tensor itself, and not its storage.
        and tensor._use_count() == 1  # type: ignore[attr-defined]
    )


def _references(tensor: Tensor) -> tuple[int, int]:
    """How many tensors and the like hold a tensor's storage, and how many Python variables."""
    storage = tensor.untyped_storage()
    # torch has no public name for it; https://github.com/pytorch/pytorch/pull/99698 added it for
    # CUDA graphs, which ask the same question.
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


# Of a tensor whose storage nobody else has; what the question itself adds depends on Python.
_EXCLUSIVE = _references(torch.empty(1))
