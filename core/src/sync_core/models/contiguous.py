"""A model's tensors side by side in memory, laid out like a payload, so that bytes are copied."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sync_core.errors import ModelError
from sync_core.weights.block import Block, allocate
from sync_core.weights.layout import Layout

# Past the caches, a copy is up to four times slower when its target lies so little after its source
# within the page; torch copies by way of the caches, and is slower otherwise.
_TOO_CLOSE = 704


class ContiguousTensors:
    """The memory that some tensors were moved to: a payload of them, header and body.

    A C library copies hundreds of megabytes in one go past the caches, which is up to twice as
    fast as tensor by tensor; and thousands of small tensors cost no more than their bytes.

    Args:
        layout: how the tensors lie.
        named: the model's tensors, which lie so.
        memory: where they lie.
    """

    #: Whether tensors of any model were moved in this process; to look for them takes time.
    exist = False

    def __init__(self, layout: Layout, named: Mapping[str, Tensor], memory: mmap.mmap) -> None:
        self.block = Block(torch.frombuffer(memory, dtype=torch.uint8))
        self._layout = layout
        self._named = named
        self._tensors = [named[spec.name] for spec in layout.specs]
        self._pointers = self._current_pointers()

    @classmethod
    def gather(cls, layout: Layout, named: Mapping[str, Tensor]) -> Self:
        """Move tensors into one block, if nothing else views their memory.

        A tensor keeps its identity; only the address of its elements changes. Views of it, numpy
        arrays or aliases such as a `state_dict` would continue looking at the old memory, so where
        there are any, or memory is shared, not torch's own or not on the CPU, nothing is moved.
        What reads the tensors by their addresses alone cannot be seen.

        Raises:
            ModelError: that is so of one of them; the message names it.
        """
        for name, tensor in named.items():
            if obstacle := _obstacle(tensor):
                raise ModelError(f"{name!r} cannot be moved to other memory: {obstacle}")
        # Tensors pointed elsewhere in inference mode could not be trained any more.
        with torch.inference_mode(mode=False):
            memory = _move(layout, named)
            ContiguousTensors.exist = True
            return cls(layout, named, memory)

    @classmethod
    def find(cls, layout: Layout, named: Mapping[str, Tensor]) -> Self | None:
        """The memory in which tensors lie already, moved there for this layout; None elsewhere."""
        memory = _memories.get(_begin(layout, named)) if _memories else None
        if memory is None or memory[: len(layout.header)] != layout.header:
            return None
        found = cls(layout, named, memory)
        begin = found.block.memory.data_ptr() + len(layout.header)
        expected = [begin + spec.offset if spec.nbytes else 0 for spec in layout.specs]
        plain = all(map(_is_plain, found._tensors))
        return found if plain and found._pointers == expected else None

    def holds(self, layout: Layout, named: Mapping[str, Tensor]) -> bool:
        """Return whether the model has the same tensors still, and they lie here.

        Args:
            layout: the model's, another one once a tensor has another form.
            named: the model's tensors, as they are now.
        """
        # The memory is ours, so a tensor that still begins where it was put lies in it.
        return (
            layout is self._layout
            and named is self._named
            and self._current_pointers() == self._pointers
        )

    def write(self, bodies: Sequence[Tensor]) -> None:
        """Copy the bytes of a payload of the same layout over all of the tensors.

        Args:
            bodies: the bytes, in the stretches in which they lie.
        """
        (own,) = self.block.bodies(self._layout)
        target, begin = own.numpy(), 0
        for body in bodies:
            _copy_bytes(target[begin : begin + body.numel()], body)
            begin += body.numel()
        # What autograd has saved for a backward pass has changed, as with any in-place copy.
        increment_version(self._tensors)

    def _current_pointers(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))


# Memory that tensors were moved to, by its address, for as long as one of them lies there.
_memories: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()


def _move(layout: Layout, named: Mapping[str, Tensor]) -> mmap.mmap:
    # With the header, as the tensors lie in their pages like those of a payload then; see
    # _TOO_CLOSE.
    memory = allocate(layout.nbytes)
    memory[: len(layout.header)] = layout.header
    for spec in layout.specs:
        if not spec.nbytes:
            continue
        # Each has its own storage, so that saving one tensor does not save them all.
        place = torch.frombuffer(
            memory,
            dtype=torch.uint8,
            offset=len(layout.header) + spec.offset,
            count=spec.nbytes,
        )
        moved = place.view(spec.dtype).view(spec.shape)
        tensor = named[spec.name]
        moved.copy_(tensor.data)
        tensor.data = moved
    _memories[_address_of(memory)] = memory
    return memory


def _begin(layout: Layout, named: Mapping[str, Tensor]) -> int:
    """Return the address at which the tensors' block would begin."""
    first = next((spec for spec in layout.specs if spec.nbytes), None)
    if first is None:
        return 0
    return named[first.name].data_ptr() - first.offset - len(layout.header)


def _address_of(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data


def _copy_bytes(target: np.ndarray[Any, np.dtype[np.uint8]], source: Tensor) -> None:
    distance = (target.ctypes.data - source.data_ptr()) % mmap.PAGESIZE
    if 0 < distance < _TOO_CLOSE:
        torch.from_numpy(target).copy_(source)
    else:
        np.copyto(target, source.numpy())


def _is_plain(tensor: Tensor) -> bool:
    """Return whether its bytes, as they lie in memory, are its values."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _obstacle(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be moved; None if it can."""
    if tensor.device.type != "cpu":
        return f"it is on {tensor.device}, and only tensors of the CPU are moved"
    if not _is_plain(tensor):
        return "it is not contiguous"
    if tensor.is_inference():
        return "it was made in inference mode"
    if tensor.is_shared() or tensor.is_pinned():
        return "it lies in shared or pinned memory"
    # An array made by DLPack holds the tensor itself, and not its storage.
    if not _is_exclusive(tensor):
        return (
            "something else holds its memory, as a state_dict, a view, an array, or a backward "
            "pass that is still to come do"
        )
    return None


def check_allocated(named: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` for a tensor whose memory torch did not allocate, or has lent to NumPy.

    To be asked before a copy: torch makes memory fixed that NumPy has copied.
    """
    for name, tensor in named.items():
        if not _is_allocated(tensor):
            raise ModelError(
                f"{name!r} cannot be moved to other memory: its memory cannot be resized, as that "
                "of an array, of a file or of a checkpoint that was loaded; copy it first: "
                "tensor.data = tensor.data.clone()"
            )


def _is_allocated(tensor: Tensor) -> bool:
    """Return whether torch allocated the memory of a tensor, or it is a block of this module."""
    begin = tensor.data_ptr()
    return tensor.untyped_storage().resizable() or any(
        address <= begin < address + len(memory) for address, memory in _memories.items()
    )


def _is_exclusive(tensor: Tensor) -> bool:
    """Return whether nothing else holds the memory of a tensor; False where torch cannot tell."""
    try:
        used = tensor._use_count()  # type: ignore[attr-defined]
        return bool(used == 1 and _references(tensor) == _EXCLUSIVE)
    except AttributeError:  # private to torch, which may remove it
        return False


def _references(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of C++ and of Python references to a tensor's storage."""
    storage = tensor.untyped_storage()
    # torch has no public name for it; https://github.com/pytorch/pytorch/pull/99698 added it for
    # CUDA graphs, which ask the same question.
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


# The counts of a tensor whose storage is not shared; the call itself adds to them.
try:
    _EXCLUSIVE = _references(torch.empty(1, device="cpu"))
except AttributeError:  # see `_is_exclusive`
    _EXCLUSIVE = (0, 0)
