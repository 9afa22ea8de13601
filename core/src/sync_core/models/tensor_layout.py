"""The layout of named tensors, kept while their names, signatures and ties stay as they are."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sync_core.errors import ModelError
from sync_core.weights.layout import Layout, place_of

try:
    # What torch.compile asks before it runs what it has compiled. It has no public name; see
    # torch/csrc/dynamo/guards.cpp.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment,misc]

_is_nested = operator.attrgetter("is_nested")


class TensorSignatures:
    """The types, dtypes, devices, shapes and strides of tensors, and whether they negate.

    Not where they lie. A tensor costs a tenth of a microsecond; in Python, a microsecond and more.

    Args:
        tensors: such as can travel, no one of them twice.

    Example:
        >>> signatures = TensorSignatures([torch.zeros(2, 3)])
        >>> signatures.fit([torch.ones(2, 3)]), signatures.fit([torch.ones(3, 2)])
        (True, False)
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._signatures = list(map(_signature, tensors))
        self._guards = _guards(tensors)

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these have the same signatures, one by one."""
        if len(tensors) != len(self._signatures):
            return False
        # The guards would end the process: a nested tensor has no strides that they can ask.
        if any(map(_is_nested, tensors)):
            return False
        if self._guards is not None and self._guards.check(*tensors):
            return True
        # They also tell whether a gradient is wanted, and in which modes torch is.
        # One at a time: thousands of tuples alive at once would set off the garbage collector.
        if not all(map(operator.eq, map(_signature, tensors), self._signatures)):
            return False
        self._guards = _guards(tensors)
        return True


def _signature(tensor: Tensor) -> tuple[object, ...]:
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


class KnownLayout:
    """A layout, and whether other tensors have it too. It keeps none of the tensors.

    To ask takes a tenth of what it takes to make a layout and its header again.

    Args:
        named: the tensors whose layout it is.

    Raises:
        ModelError: a tensor that cannot travel; the message names it.

    Example:
        >>> known = KnownLayout({"weight": torch.zeros(2, 3)})
        >>> known.fits({"weight": torch.ones(2, 3)}), known.fits({"weight": torch.ones(3, 2)})
        (True, False)
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.layout = Layout.of(named)
        self._names = list(named)
        self._signatures = TensorSignatures(travelling(self.layout, named))

    def fits(self, named: Mapping[str, Tensor]) -> bool:
        """Return whether these tensors have this layout, tied ones still tied."""
        if list(named) != self._names:
            return False
        return self.still_fits(named, travelling(self.layout, named))

    def still_fits(self, named: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors of the same names have this layout.

        Args:
            named: the tensors.
            tensors: those of them that travel, in the order of the layout.
        """
        if not self._signatures.fit(tensors):
            return False
        for name, owner in self.layout.aliases:
            if place_of(named[name]) != place_of(named[owner]):
                return False
        return True


def travelling(layout: Layout, named: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that travel, in the order of the layout: of tied ones, the first."""
    if not layout.aliases:
        return list(named.values())
    return [named[spec.name] for spec in layout.specs]


def check_memory(named: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` for a tensor whose memory was taken away."""
    if all(map(Tensor.data_ptr, named.values())):
        return
    # Such a tensor has no address. To read it, or to write to it, would end the process.
    for name, tensor in named.items():
        if tensor.numel() and not tensor.data_ptr():
            raise ModelError(
                f"{name!r} has no memory: its storage was resized to nothing, as sharding does "
                "with parameters that are not in use; send and receive while the model is whole"
            )
