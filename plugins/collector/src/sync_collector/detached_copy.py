"""Copies of what a trainer acts and learns with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

Value = TypeVar("Value")


def detached_copy(value: Value) -> Value:
    """A deep copy; of a tensor with a graph, which torch does not copy, its values.

    A policy has one when it has kept what it computed in a training step, or a weight that it
    computes from others (``torch.nn.utils.weight_norm``).

    Example:
        >>> import torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> detached_copy([weight, 2 * weight])
        [tensor([1.], requires_grad=True), tensor([2.])]
    """
    with _Detaching():
        return copy.deepcopy(value)


class _Detaching(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            detached = tensor.detach()
            copied = detached.__deepcopy__(memo)
            # Something else may have its id next.
            memo.pop(id(detached), None)
            return copied
        return func(*args, **(kwargs or {}))
