"""Finds the tensors of a model and their layout, and again only after the model has changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sync_core.errors import ModelError
from sync_core.models.extract import (
    Strategy,
    check_saved,
    combined,
    extra_tensors,
    named_tensors,
    plain_tensors,
)
from sync_core.models.lookup import leaves
from sync_core.models.modules import check_flat, modules_with_extra_state
from sync_core.weights.layout import Layout, place_of

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
    # DeepSpeed and `nn.Module.__setstate__` do, names moved, and modules given another class, which
    # may save more.
    def __init__(self, module: nn.Module, strategy: Strategy) -> None:
        check_flat(module)
        self._module = module
        self._persistent = strategy == "checkpoint"
        self._modules: list[nn.Module] = []
        self._filled: list[Any] = []
        self._empty: list[Any] = []
        # None before the first call.
        self._names: list[str] | None = None
        self._before: list[Any] = []
        self._found: dict[str, Tensor] = {}
        self._has_extra_state = False

    def __call__(self) -> dict[str, Tensor]:
        if not (
            # If a value has come or gone, so has a name.
            all(map(operator.is_, self._held(), self._before))
            and not any(self._empty)
            and list(chain.from_iterable(map(_keys, self._filled))) == self._names
        ):
            self._find()
        if self._has_extra_state:
            return self._found | extra_tensors(self._module)
        return self._found

    def _held(self) -> Iterator[Any]:
        """The dicts and types of the modules known, then what those dicts hold."""
        return chain(
            chain.from_iterable(map(_dicts_of, self._modules)),
            map(type, self._modules),
            chain.from_iterable(map(_values, self._filled)),
        )

    def _find(self) -> None:
        check_saved(self._module, persistent=self._persistent)
        self._found = plain_tensors(self._module, persistent=self._persistent)
        self._has_extra_state = bool(modules_with_extra_state(self._module))
        self._modules = list(self._module.modules())
        dicts = list(chain.from_iterable(map(_dicts_of, self._modules)))
        self._filled = [held for held in dicts if held]
        self._empty = [held for held in dicts if not held]
        self._names = list(chain.from_iterable(map(_keys, self._filled)))
        self._before = list(self._held())


def _identical(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


try:
    # What torch.compile asks before it runs what it has compiled. It has no public name; see
    # torch/csrc/dynamo/guards.cpp.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment,misc]

_is_nested = operator.attrgetter("is_nested")


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

    To ask takes a tenth of what it takes to make a layout and its header again: a tensor costs a
    tenth of a microsecond; in Python, a microsecond and more.

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
        tensors = travelling(self.layout, named)
        # Not where they lie.
        self._signatures = list(map(_signature, tensors))
        self._guards = _guards(tensors)

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
        # The guards would end the process: a nested tensor has no strides that they can ask.
        if len(tensors) != len(self._signatures) or any(map(_is_nested, tensors)):
            return False
        # They also tell whether a gradient is wanted, and in which modes torch is.
        if self._guards is None or not self._guards.check(*tensors):
            # One at a time: thousands of tuples alive at once would set off the garbage collector.
            if not all(map(operator.eq, map(_signature, tensors), self._signatures)):
                return False
            self._guards = _guards(tensors)
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
            if hasattr(tensor, "__tensor_flatten__"):
                raise ModelError(
                    f"{name!r} is a {type(tensor).__name__}, a subclass of Tensor that keeps its "
                    "values in other tensors and has no memory itself; make those buffers or "
                    "parameters of the module"
                )
            raise ModelError(
                f"{name!r} has no memory: its storage was resized to nothing, as sharding does "
                "with parameters that are not in use; send and receive while the model is whole"
            )
