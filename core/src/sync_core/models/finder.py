"""Finds the tensors of a model, and again only after the model has changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sync_core.models.extra_state import modules_with_extra_state
from sync_core.models.extract import (
    Strategy,
    check_saved,
    combined,
    extra_tensors,
    named_tensors,
    plain_tensors,
)
from sync_core.models.multi_model import leaves

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
        >>> forms = TensorSignatures([torch.zeros(2, 3)])
        >>> forms.fit([torch.ones(2, 3)]), forms.fit([torch.ones(3, 2)])
        (True, False)
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._forms = list(map(_form, tensors))
        self._guards = _guards(tensors)
        self._tensors = tensors

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these have the same forms, one by one."""
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


# Those of TorchScript are not dicts.
_values = operator.methodcaller("values")


def finder(model: Any, strategy: Strategy) -> Callable[[], dict[str, Tensor]]:
    """A function that gives the model's named tensors as they are now."""
    if isinstance(model, Mapping):
        return _MappingFinder(model, strategy)
    if isinstance(model, nn.Module) and strategy == "tensordict":
        return _ModuleFinder(model)
    return lambda: named_tensors(model, strategy)


class _MappingFinder:
    # As long as every module in it finds the same dict, the one made of them all is kept.
    def __init__(self, models: Mapping[str, Any], strategy: Strategy) -> None:
        self._models = models
        self._strategy = strategy
        self._finders: dict[str, tuple[nn.Module, Callable[[], dict[str, Tensor]]]] = {}
        self._names: list[str] = []
        self._values: list[Any] = []
        self._found: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, Tensor]:
        names: list[str] = []
        values: list[Any] = []
        for name, leaf in leaves(self._models):
            names.append(name)
            values.append(self._find_in(name, leaf) if isinstance(leaf, nn.Module) else leaf)
        if names != self._names or not _identical(values, self._values):
            self._found = combined(zip(names, values, strict=True))
            self._names, self._values = names, values
        return self._found

    def _find_in(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        known = self._finders.get(name)
        if known is None or known[0] is not module:
            known = self._finders[name] = (module, finder(module, self._strategy))
        return known[1]()


class _ModuleFinder:
    # Comparing what the module's dicts hold with what they held costs microseconds per thousand
    # tensors; walking the module costs milliseconds.
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._dicts: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._found: dict[str, Tensor] = {}
        self._has_extra_state = False

    def __call__(self) -> dict[str, Tensor]:
        if not self._dicts or not _identical(self._current_values(), self._values):
            self._find()
        if self._has_extra_state:
            return self._found | extra_tensors(self._module)
        return self._found

    def _find(self) -> None:
        check_saved(self._module)
        self._dicts = [
            held
            for module in self._module.modules()
            for held in (module._parameters, module._buffers, module._modules)
        ]
        self._values = self._current_values()
        self._found = plain_tensors(self._module)
        self._has_extra_state = bool(modules_with_extra_state(self._module))

    def _current_values(self) -> list[Any]:
        return list(chain.from_iterable(map(_values, self._dicts)))


def _identical(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))
