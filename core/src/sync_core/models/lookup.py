"""Models by reference, such as ``"env.transform[0]"``, and mappings of several by name."""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from sync_core.errors import ModelError, ModelPathError
from sync_core.models.modules import flatten, is_extra_state, is_whole_extra_state

_STEP = re.compile(
    r"""
    (?:^|\.)(?P<attribute>[^\W\d]\w*)            # .name
    | \[(?P<index>-?\d+)\]                       # [0]
    | \[(?P<quote>['"])(?P<key>.*?)(?P=quote)\]  # ['key']
    """,
    re.VERBOSE,
)


def resolve(root: Any, path: str) -> Any:
    """Follow a dotted and subscripted path from ``root``.

    Args:
        root: where the path starts.
        path: attributes, integer subscripts and quoted string subscripts.

    Raises:
        ModelPathError: the path is malformed, or a step is missing; the message names the step
            and the type of the object that lacks it.

    Example:
        >>> resolve(torch.nn.Sequential(torch.nn.Linear(2, 3)), "[0].weight").shape
        torch.Size([3, 2])
    """
    target, position = root, 0
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None or match.end() == position:
            raise ModelPathError(
                f"{path!r} is not a path: cannot read {path[position:]!r}; "
                'write it like "env.transform[0]" or "heads[\'a\']"'
            )
        where = path[:position] or "the root"
        try:
            target = _step(target, match)
        except (AttributeError, LookupError, TypeError) as error:
            if not _is_absent(error, target, match):
                raise
            raise ModelPathError(
                f"{path!r} leads nowhere: {where!r}, a {type(target).__name__}, "
                f"has no {match.group().removeprefix('.')!r} ({type(error).__name__}: {error})"
            ) from error
        position = match.end()
    return target


def _step(target: Any, match: re.Match[str]) -> Any:
    attribute = match["attribute"]
    if attribute is not None:
        declared = inspect.getattr_static(type(target), attribute, None)
        if isinstance(declared, property):
            # nn.Module.__getattr__ would replace an AttributeError that the property raises.
            return declared.__get__(target)
        return getattr(target, attribute)
    if match["index"] is not None:
        return target[int(match["index"])]
    return target[match["key"]]


def _is_absent(error: Exception, target: Any, match: re.Match[str]) -> bool:
    """Return whether a step failed because the target lacks it, not inside user code."""
    if match["attribute"] is None:
        return not isinstance(error, AttributeError)
    if not isinstance(error, AttributeError):
        return False
    return error.obj is target and error.name == match["attribute"]


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
