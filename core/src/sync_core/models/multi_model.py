"""Several models as one: a mapping from names to modules, TensorDicts and tensors."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from sync_core.errors import ModelError
from sync_core.models.extra_state import flatten, is_extra_state, is_whole_extra_state
from sync_core.models.paths import resolve

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_MODELS = (nn.Module, str)


def is_tensordict(value: object) -> TypeGuard[TensorDictBase]:
    """Return whether this is a TensorDict; False while tensordict is not imported.

    That takes as long as to import torch, and workers need not have it.

    Example:
        >>> is_tensordict({})
        False
    """
    # Where another thread is still importing it, it has no such class yet.
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", ())
    return isinstance(value, base)


def leaves(models: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The modules, the tensors, and whatever else a mapping holds, under dotted names.

    Raises:
        ModelError: a name that is not a string.
    """
    if is_tensordict(models):
        for key, value in models.items(include_nested=True, leaves_only=True):
            yield prefix + (key if isinstance(key, str) else ".".join(key)), value
        return
    for key, value in models.items():
        if not isinstance(key, str):
            raise ModelError(f"weights need names that are strings, not {key!r}")
        name = prefix + key
        whole = is_whole_extra_state(name) and not isinstance(value, Tensor)
        if isinstance(value, Mapping) and not whole:
            yield from leaves(value, f"{name}.")
        elif whole or (is_extra_state(name) and not isinstance(value, Tensor)):
            yield from flatten(name, value)
        else:
            yield name, value


def modules_in(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules that a model is made of, each with the prefix of its tensors' names.

    Example:
        >>> modules_in(torch.nn.Identity())
        [('', Identity())]
        >>> modules_in({"actor": torch.nn.Identity(), "critics": {"a": torch.nn.ReLU()}})
        [('actor.', Identity()), ('critics.a.', ReLU())]
    """
    if isinstance(model, nn.Module):
        return [("", model)]
    if isinstance(model, Mapping):
        return [(f"{name}.", leaf) for name, leaf in leaves(model) if isinstance(leaf, nn.Module)]
    return []


def names_of(model: Any) -> tuple[str, ...]:
    """The names of several models, or of references to them; none for a single model.

    Example:
        >>> names_of({"actor": torch.nn.Identity(), "critic": "nets[1]"})
        ('actor', 'critic')
        >>> names_of({"weight": torch.ones(2)})
        ()
    """
    if not _is_plain_mapping(model):
        return ()
    values = model.values()
    return tuple(model) if all(isinstance(v, _MODELS) or is_tensordict(v) for v in values) else ()


def same(left: Any, right: Any) -> bool:
    """Return whether two models are one object, or two mappings that hold the same ones."""
    if left is right:
        return True
    if not _is_plain_mapping(left) or not _is_plain_mapping(right):
        return False
    return list(left) == list(right) and all(map(operator.is_, left.values(), right.values()))


def refers(model: Any) -> bool:
    """Return whether a model is given by string references, or some of several models are."""
    if _is_plain_mapping(model):
        return any(isinstance(value, str) for value in model.values())
    return isinstance(model, str)


def look_up(model: Any, context: Any, before: Any = None) -> Any:
    """The model, or what its string references lead to in ``context`` now.

    Args:
        model: a model, a reference, or a mapping with references among its values.
        context: the object in which references are looked up.
        before: the previous result, which is returned again if nothing has changed, so
            that what is known of several models can be kept.

    Raises:
        ModelPathError: a reference leads nowhere.

    Example:
        >>> context = {"nets": [torch.nn.Identity()]}
        >>> look_up({"policy": "['nets'][0]"}, context)
        {'policy': Identity()}
    """
    if not refers(model):
        return model
    if isinstance(model, str):
        return resolve(context, model)
    found = {
        name: resolve(context, value) if isinstance(value, str) else value
        for name, value in model.items()
    }
    return before if same(before, found) else found


def _is_plain_mapping(model: Any) -> bool:
    return isinstance(model, Mapping) and not is_tensordict(model)
