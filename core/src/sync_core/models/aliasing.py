"""Checks that a write to each tensor of a model stays there and changes no other tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd

import torch
from torch import Tensor

from sync_core.errors import ModelError
from sync_core.models.extra_state import is_extra_state
from sync_core.weights.layout import place_of


def check_writable(named: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` where elements share memory, those of one tensor or of two.

    Tied tensors are one under several names, and no fault; nor are tensors that lie between each
    other's elements, as columns of a matrix do. Extra state may view what it likes: it is made
    again whenever it is read.

    Example:
        >>> matrix = torch.zeros(3, 4)
        >>> check_writable({"left": matrix[:, :2], "right": matrix[:, 2:]})
        >>> check_writable({"left": matrix[:, :3], "right": matrix[:, 2:]})
        Traceback (most recent call last):
        ...
        sync_core.errors.ModelError: 'left' and 'right' share memory, but are not one tensor: ...
    """
    for name, tensor in named.items():
        if _overlaps_itself(tensor):
            raise ModelError(
                f"{name!r} was made by expand() or as_strided(): its elements share memory and "
                "cannot be written one by one; clone() it first"
            )
    untied: dict[torch.device, dict[object, tuple[str, Tensor]]] = {}
    for name, tensor in named.items():
        if tensor.numel() and not is_extra_state(name):
            places = untied.setdefault(tensor.device, {})
            places.setdefault(place_of(tensor), (name, tensor))
    for places in untied.values():
        for group in _entangled(places.values()):
            _check_apart(group)


def check_held(named: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` for a tensor that is another one when the model is read again."""
    for name, tensor in named.items():
        if tensor.data_ptr() != again[name].data_ptr() and not is_extra_state(name):
            raise ModelError(
                f"{name!r} is recomputed whenever it is read, as those of a TensorDict that is "
                "stacked lazily are, so that what is written into it is lost; give a model that "
                "holds its tensors, such as tensordict.contiguous()"
            )


class Places:
    """The addresses and strides of tensors, to notice tensors that were moved."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._pointers = list(map(Tensor.data_ptr, tensors))
        self._strides = list(map(Tensor.stride, tensors))

    def hold(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether these lie just so."""
        tensors = list(tensors)
        return list(map(Tensor.data_ptr, tensors)) == self._pointers and all(
            # One at a time: thousands of tuples alive at once would set off the garbage collector.
            map(operator.eq, map(Tensor.stride, tensors), self._strides)
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    reach, certain = 0, True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride == 0:
                return True
            certain &= stride > reach
            reach += (size - 1) * stride
    if certain:
        return False
    taken = _nothing_taken(reach + 1)
    taken.as_strided(tensor.shape, tensor.stride()).fill_(1)
    return int(taken.sum()) < tensor.numel()


def _entangled(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups of tensors in which each begins before the memory of those before it has ended."""
    group: list[tuple[str, Tensor]] = []
    end = 0
    for name, tensor in sorted(tensors, key=_begin):
        if group and tensor.data_ptr() >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append((name, tensor))
        end = max(end, _end(tensor))
    if len(group) > 1:
        yield group


def _check_apart(group: Sequence[tuple[str, Tensor]]) -> None:
    begin = group[0][1].data_ptr()
    sizes = (gcd(tensor.itemsize, tensor.data_ptr() - begin) for _, tensor in group)
    unit = gcd(*sizes)
    taken = _nothing_taken((max(_end(tensor) for _, tensor in group) - begin) // unit)
    views: list[Tensor] = []
    for name, tensor in group:
        width = tensor.itemsize // unit
        view = taken.as_strided(
            (*tensor.shape, width),
            (*(stride * width for stride in tensor.stride()), 1),
            (tensor.data_ptr() - begin) // unit,
        )
        if view.any():
            taken.zero_()
            view.fill_(1)
            other = next(group[i][0] for i, earlier in enumerate(views) if earlier.any())
            raise ModelError(
                f"{other!r} and {name!r} share memory, but are not one tensor: to write one would "
                f"change the other, and nothing was written; clone() one of them, or tie them "
                "by assigning the same Parameter, here and in the trainer's model"
            )
        view.fill_(1)
        views.append(view)


def _nothing_taken(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.bool, device="cpu")


def _begin(found: tuple[str, Tensor]) -> int:
    return found[1].data_ptr()


def _end(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr() + (last + 1) * tensor.itemsize
