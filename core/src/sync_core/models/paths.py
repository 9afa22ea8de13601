"""String references to models: ``"policy"``, ``"env.transform[0]"``, ``"heads['a']"``."""

from __future__ import annotations

import inspect
import re
from typing import Any

from sync_core.errors import ModelPathError

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
