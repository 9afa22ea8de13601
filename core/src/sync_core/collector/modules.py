"""Which module a policy acts with: the one whose weights have to be kept fresh."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from sync_core.errors import ModelError
from sync_core.extract import named_tensors


def module_of(policy: Any) -> nn.Module | None:
    """The module that a policy is, or certainly acts with; None when it has no tensors.

    That is the module itself, the one whose method the policy is, or the one that a
    `functools.partial` calls.

    Args:
        policy: what a collector acts with; None for random actions.

    Raises:
        ModelError: it acts with modules that cannot be told for certain.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> module_of(net.forward) is module_of(functools.partial(net)) is net
        True
    """
    if isinstance(policy, nn.Module):
        return policy if named_tensors(policy) else None
    if isinstance(policy, functools.partial):
        hidden = _first(_modules((*policy.args, *policy.keywords.values())))
        if hidden is None:
            return module_of(policy.func)
    elif isinstance(policy, MethodType) and isinstance(policy.__self__, nn.Module):
        return module_of(policy.__self__)
    else:
        hidden = _first(_modules(_within(policy)))
    if hidden is None:
        return None
    raise ModelError(
        f"the policy is a {type(policy).__name__} that uses a {type(hidden).__name__}, whose "
        "weights would never be refreshed; give the collector the module itself, or one whose "
        "forward() does what the policy does"
    )


def _within(policy: Any) -> tuple[Any, ...]:
    """What a callable that is no module may act with."""
    if isinstance(policy, MethodType):
        return (*_within(policy.__func__), *_attributes(policy.__self__))
    if isinstance(policy, FunctionType):
        loads = {i.argval for i in dis.get_instructions(policy) if i.opname == "LOAD_GLOBAL"}
        used = [value for name, value in policy.__globals__.items() if name in loads]
        enclosed = inspect.getclosurevars(policy).nonlocals.values()
        return (*used, *enclosed, *(policy.__defaults__ or ()))
    return _attributes(policy)


def _attributes(instance: Any) -> tuple[Any, ...]:
    """The values of an object's attributes."""
    return tuple(getattr(instance, "__dict__", {}).values())


def _modules(values: tuple[Any, ...]) -> Iterator[nn.Module]:
    for value in values:
        owner = value.__self__ if isinstance(value, MethodType) else value
        if isinstance(owner, nn.Module) and named_tensors(owner):
            yield owner


def _first(modules: Iterator[nn.Module]) -> nn.Module | None:
    return next(modules, None)
