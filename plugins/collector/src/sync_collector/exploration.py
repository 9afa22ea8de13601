"""The exploration type of probabilistic policies in a collector's worker."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from tensordict.nn import InteractionType, set_interaction_type

# The trainer's own modules are not to be changed by workers in its threads. A tensordict that
# knows no difference between threads sets it for the whole process.
_IN_THIS_THREAD: Mapping[str, Any] = (
    {"thread_local": True}
    if "thread_local" in inspect.signature(set_interaction_type).parameters
    else {}
)


def acting(exploration_type: InteractionType) -> AbstractContextManager[Any]:
    """Act as `tensordict.nn.set_interaction_type` says, in this thread."""
    context: AbstractContextManager[Any] = set_interaction_type(exploration_type, **_IN_THIS_THREAD)
    return context


def exploration(given: InteractionType | str) -> InteractionType:
    """The exploration type meant by an argument.

    Raises:
        ValueError: there is none of that name.

    Example:
        >>> exploration("random").name
        'RANDOM'
    """
    if isinstance(given, InteractionType):
        return given
    names = [kind.name.lower() for kind in InteractionType]
    if str(given).lower() not in names:
        raise ValueError(
            f"exploration_type is {given!r}; give one of {', '.join(map(repr, names))}, or a "
            "tensordict.nn.InteractionType"
        )
    return InteractionType[given.upper()]
