"""Finds the tensors of a model, and again only after the model has changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
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
_keys = operator.methodcaller("keys")
_values = operator.methodcaller("values")
_dicts_of = operator.attrgetter("_parameters", "_buffers", "_modules")


def tensor_finder(model: Any, strategy: Strategy) -> Callable[[], dict[str, Tensor]]:
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
            known = self._finders[name] = (module, tensor_finder(module, self._strategy))
        return known[1]()


class _ModuleFinder:
    # Comparing what the module's dicts hold with what they held costs microseconds per thousand
    # tensors; walking the module costs milliseconds. The dicts themselves may be replaced, as
    # DeepSpeed and `nn.Module.__setstate__` do, and names moved.
    def __init__(self, module: nn.Module, strategy: Strategy) -> None:
        check_flat(module)
        self._module = module
        self._persistent = strategy == "checkpoint"
        self._modules: list[nn.Module] = []
        self._dicts: list[Any] = []
        self._filled: list[Any] = []
        self._empty: list[Any] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._found: dict[str, Tensor] = {}
        self._has_extra_state = False

    def __call__(self) -> dict[str, Tensor]:
        if not self._is_unchanged():
            self._find()
        if self._has_extra_state:
            return self._found | extra_tensors(self._module)
        return self._found

    def _is_unchanged(self) -> bool:
        dicts = chain.from_iterable(map(_dicts_of, self._modules))
        return (
            bool(self._modules)
            and all(map(operator.is_, dicts, self._dicts))
            and not any(self._empty)
            and list(chain.from_iterable(map(_keys, self._filled))) == self._names
            # As many as names.
            and all(map(operator.is_, _chained(self._filled), self._values))
        )

    def _find(self) -> None:
        check_saved(self._module)
        self._found = plain_tensors(self._module, persistent=self._persistent)
        self._has_extra_state = bool(modules_with_extra_state(self._module))
        self._modules = list(self._module.modules())
        self._dicts = list(chain.from_iterable(map(_dicts_of, self._modules)))
        self._filled = [held for held in self._dicts if held]
        self._empty = [held for held in self._dicts if not held]
        self._names = list(chain.from_iterable(map(_keys, self._filled)))
        self._values = list(_chained(self._filled))


def _chained(dicts: list[Any]) -> Iterator[Any]:
    return chain.from_iterable(map(_values, dicts))


def _identical(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))
