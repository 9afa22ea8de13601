"""Attributes of modules that no update sends, and that may change what a model computes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# Objects of these packages, and modules of the first ones, have nothing that a trainer changes.
_LIBRARIES = frozenset(
    {"torch", "tensordict", "torchrl", "transformers", "peft", "accelerate", "numpy", "builtins"}
)
# What every module has; a trainer changes the mode of `train` and `eval` for itself.
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str)
# Objects within objects, entries of one, and values of an array that are looked at.
_DEEPEST, _MOST, _VALUES = 3, 64, 256


class Change(NamedTuple):
    """An attribute that has changed; the values are those to be shown."""

    path: str
    module: nn.Module
    before: Any
    after: Any

    @property
    def advice(self) -> str:
        """A sentence about the change, with the code to type."""
        name, kind = self.path.rpartition(".")[2], type(self.module).__name__
        told = (
            f"{self.path} changed from {self.before!r:.80} to {self.after!r:.80} in the trainer, "
            f"and workers keep {self.before!r:.80}: an update sends parameters and buffers. If "
            "workers act by it, type "
        )
        plain = type(self.before) is type(self.after) and type(self.after) in (bool, int, float)
        if plain and name in vars(self.module):
            return (
                f"{told}self.register_buffer({name!r}, torch.tensor({self.before})) in {kind}, and "
                f"{self.path}.fill_({self.after}) for {self.path} = {self.after}"
            )
        return (
            f"{told}self.register_buffer(…) for a tensor in {kind}, or let {kind} have the methods "
            "get_extra_state and set_extra_state"
        )


class UnsentAttributes:
    """The state of models beside parameters, buffers and extra state, as it is now.

    Numbers, strings, arrays and plain tensors count, also in lists, tuples, dicts and small objects
    of the user's classes. Of an array or tensor, up to 256 values are compared; a GPU is not read.

    Args:
        models: modules by name; others are left out.

    Example:
        >>> class Policy(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.epsilon = 0.1
        >>> policy = Policy()
        >>> attributes = UnsentAttributes({"policy": policy})
        >>> policy.epsilon = 0.5
        >>> [(change.path, change.before, change.after) for change in attributes.changes()]
        [('policy.epsilon', 0.1, 0.5)]
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = {name: m for name, m in models.items() if isinstance(m, nn.Module)}
        self._known = {path: value for path, _, value in self._found()}

    def changes(self) -> list[Change]:
        """Return the attributes that have changed since this object was made."""
        return [
            Change(path, module, _shown(self._known[path]), _shown(value))
            for path, module, value in self._found()
            if path in self._known and self._known[path] != value
        ]

    def _found(self) -> Iterator[tuple[str, nn.Module, Any]]:
        for name, model in self._models.items():
            for path, module in model.named_modules():
                kind = type(module)
                if kind.__module__.partition(".")[0] in _LIBRARIES:
                    continue
                if kind.get_extra_state is not nn.Module.get_extra_state:
                    continue
                prefix = f"{name}.{path}" if path else name
                entries = [(k, v) for k, v in vars(module).items() if k not in _OF_ANY_MODULE]
                for where, value in _comparable(prefix, entries, ".{}"):
                    yield where, module, value


def _comparable(
    path: str, entries: Iterable[tuple[Any, Any]], form: str, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the plain values among these, each with the expression that leads to it."""
    for name, value in entries:
        here = path + form.format(name)
        if type(value) in _PLAIN:
            # NaN is not equal to itself.
            yield here, value if value == value else "nan"  # noqa: PLR0124
        elif isinstance(value, (np.ndarray, np.generic)):
            yield here, _sample(np.asarray(value))
        elif isinstance(value, Tensor):
            # Reading a DTensor is a call of all ranks.
            if type(value) is Tensor and value.is_cpu and _is_plain(value):
                yield here, _sample(value.detach())
        elif depth < _DEEPEST and (parts := _parts(value)) is not None:
            yield from _comparable(here, *parts, depth + 1)


def _parts(value: Any) -> tuple[list[tuple[Any, Any]], str] | None:
    """Return the entries of a small container or object, and how an expression names one."""
    if isinstance(value, dict):
        found = list(value.items()), "[{!r}]"
    elif isinstance(value, (list, tuple)):
        found = list(enumerate(value)), "[{}]"
    elif hasattr(value, "__dict__") and _is_users(type(value)) and not callable(value):
        found = list(vars(value).items()), ".{}"
    else:
        return None
    return found if len(found[0]) <= _MOST else None


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _is_users(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package == "__main__" or package not in _LIBRARIES | sys.stdlib_module_names


class _Sample(NamedTuple):
    """Some bytes of an array, and how it is shown."""

    kind: tuple[Any, ...]
    data: bytes
    shown: str


def _sample(array: Any) -> _Sample:
    """Return a sample of an array, or of a tensor of plain memory."""
    flat = array.reshape(-1)
    some = flat[:: max(1, -(-len(flat) // _VALUES))]
    shown = f"an array of {tuple(array.shape)}"
    if len(flat) == 1 and array.dtype.itemsize > 1:
        shown = str(flat.tolist()[0])
    if isinstance(some, Tensor):
        some = some.resolve_conj().contiguous().view(torch.uint8).numpy()
    return _Sample((tuple(array.shape), array.dtype), some.tobytes(), shown)


def _shown(value: Any) -> Any:
    return _Text(value.shown) if isinstance(value, _Sample) else value


class _Text(str):
    """A text that is shown without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
