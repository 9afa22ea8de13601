"""Finds the tensors of a model, and again only after the model has changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

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
from sync_core.models.wrappers import check_flat

# Those of TorchScript are not dicts.
_values = operator.methodcaller("values")


def finder(model: Any, strategy: Strategy) -> Callable[[], dict[str, Tensor]]:
    """A function that gives the model's named tensors as they are now."""
    if isinstance(model, Mapping):
        return _MappingFinder(model, strategy)
    if isinstance(model, nn.Module) and strategy != "state_dict":
        return _ModuleFinder(model, strategy)
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
    def __init__(self, module: nn.Module, strategy: Strategy) -> None:
        check_flat(module)
        self._module = module
        self._persistent = strategy == "checkpoint"
        self._dicts: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._found: dict[str, Tensor] = {}
        self._has_extra_state = False

    def __call__(self) -> dict[str, Tensor]:
        values, known = list(chain.from_iterable(map(_values, self._dicts))), self._values
        if not values or len(values) != len(known) or not all(map(operator.is_, values, known)):
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
        self._values = list(chain.from_iterable(map(_values, self._dicts)))
        self._found = plain_tensors(self._module, persistent=self._persistent)
        self._has_extra_state = bool(modules_with_extra_state(self._module))


def _identical(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))
