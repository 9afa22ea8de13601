"""Whether tensors still are what they were but for their values, asked of thousands in one call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

try:
    # What torch.compile asks before it runs what it has compiled. It has no public name; see
    # torch/csrc/dynamo/guards.cpp.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment,misc]

_is_nested = operator.attrgetter("is_nested")


class Forms:
    """The types, dtypes, devices, shapes and strides of tensors, and whether they negate.

    Not where they lie. A tensor costs a tenth of a microsecond; in Python, a microsecond and more.

    Args:
        tensors: such as can travel, no one of them twice.

    Example:
        >>> forms = Forms([torch.zeros(2, 3)])
        >>> forms.fit([torch.ones(2, 3)]), forms.fit([torch.ones(3, 2)])
        (True, False)
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._forms = list(map(_form, tensors))
        self._guards = _guards(tensors)
        self._tensors = tensors

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these have the same forms, one by one."""
        if len(tensors) != len(self._forms):
            return False
        if not all(map(operator.is_, tensors, self._tensors)):
            # The guards would end the process: a nested tensor has no strides that they can ask.
            if any(map(_is_nested, tensors)):
                return False
            self._tensors = tensors
        if self._guards is not None and self._guards.check(*tensors):
            return True
        # They also tell whether a gradient is wanted, and in which modes torch is.
        # One at a time: thousands of tuples alive at once would set off the garbage collector.
        if not all(map(operator.eq, map(_form, tensors), self._forms)):
            return False
        self._guards = _guards(tensors)
        return True


def _form(tensor: Tensor) -> tuple[object, ...]:
    if tensor.layout != torch.strided or is_lazy(tensor):
        # It may have no strides, or no shape; nor can it travel.
        return ()
    signs = tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), signs


def _guards(tensors: Sequence[Tensor]) -> Any:
    if TensorGuards is None:
        return None
    # A list for each tensor, whatever torch's stub says.
    shapes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
