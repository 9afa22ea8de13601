"""Extra state of modules (`get_extra_state`) as named tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import unwrap
from typing import Any

from torch import Tensor, nn

from sync_core.errors import ModelError

_SUFFIX = "_extra_state"


def modules_with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The submodules that override `get_extra_state`, with the name of their extra state."""
    return [
        (f"{prefix}.{_SUFFIX}" if prefix else _SUFFIX, module)
        for prefix, module in model.named_modules()
        # Ray wraps the methods of the classes of actors, which may be modules.
        if unwrap(type(module).get_extra_state) is not nn.Module.get_extra_state
    ]


def is_extra_state(name: str) -> bool:
    """Whether a dotted name is that of extra state, or of a part of it."""
    return _SUFFIX in name.split(".")


def flatten(name: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state made of tensors, mappings, lists and tuples, with dotted names.

    Raises:
        ModelError: something else is in it.
    """
    if isinstance(state, Tensor):
        yield name, state
        return
    for key, value in _children(name, state):
        yield from flatten(f"{name}.{key}", value)


def rebuild(name: str, like: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A state of the structure of ``like`` with the tensors named, copied; missing ones kept."""
    if isinstance(like, Tensor):
        return tensors[name].clone() if name in tensors else like
    children = {
        key: rebuild(f"{name}.{key}", value, tensors) for key, value in _children(name, like)
    }
    if isinstance(like, Mapping):
        return {key: children[key] for key in like}
    return type(like)(children.values())


def _children(name: str, state: Any) -> list[tuple[Any, Any]]:
    if isinstance(state, Mapping):
        return list(state.items())
    if type(state) in (list, tuple):
        return list(enumerate(state))
    raise ModelError(
        f"{name!r} is or holds a {type(state).__name__}; extra state travels when it is made of "
        "tensors, dicts, lists and tuples: let get_extra_state return tensors"
    )
