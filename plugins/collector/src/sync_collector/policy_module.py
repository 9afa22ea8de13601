"""The module that a policy acts with, and the shapes of a lazy one."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Iterable, Mapping
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy as is_lazy_tensor

from sync_collector.envs.protocol import Env
from sync_collector.policies import TensorDictPolicy, TensorPolicy
from sync_core import ModelError
from sync_core.checks import check_mapping
from sync_core.models import named_tensors


def called_module(policy: Any) -> nn.Module | None:
    """The module that a policy is, whose method it is, or that a `functools.partial` calls."""
    if isinstance(policy, functools.partial):
        return called_module(policy.func)
    if isinstance(policy, MethodType):
        return called_module(policy.__self__)
    return policy if isinstance(policy, nn.Module) else None


def unwrapped(model: Any) -> Any:
    """Return the module inside `DistributedDataParallel` or `DataParallel`, which only trains.

    Example:
        >>> policy = nn.Linear(2, 1)
        >>> unwrapped(nn.DataParallel(policy)) is unwrapped(policy) is policy
        True
    """
    while isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    return model


def unwrapped_models(models: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the models by name, each as `unwrapped` returns it.

    Raises:
        TypeError: they are not a mapping from names.
    """
    check_mapping(models or {}, "models", "{'critic': critic}")
    return {name: unwrapped(model) for name, model in (models or {}).items()}


def module_of(policy: Any) -> nn.Module | None:
    """The module that a policy is, or certainly acts with; None when it has no tensors.

    That is the module itself, the one whose method the policy is, or the one that a
    `functools.partial` calls.

    Args:
        policy: what a collector acts with; None for random actions.

    Raises:
        ModelError: it acts with modules that cannot be identified.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> module_of(net.forward) is module_of(functools.partial(net)) is net
        True
    """
    if isinstance(policy, nn.Module):
        return policy if named_tensors(policy) else None
    if isinstance(policy, functools.partial):
        hidden = _hidden([*policy.args, *policy.keywords.values()])
        if hidden is None:
            return module_of(policy.func)
    elif isinstance(policy, MethodType) and isinstance(policy.__self__, nn.Module):
        return module_of(policy.__self__)
    else:
        hidden = _hidden([policy])
    if hidden is None:
        return None
    raise ModelError(
        f"the policy is a {type(policy).__name__} that uses a {type(hidden).__name__}, whose "
        "weights would never be refreshed; give the collector the module itself, or one whose "
        "forward() does what the policy does"
    )


def _hidden(values: list[Any]) -> nn.Module | None:
    """The first module with tensors that is found among values, or a few steps within them."""
    seen: dict[int, Any] = {}
    for _ in range(_STEPS):
        following: list[Any] = []
        for value in values:
            if isinstance(value, nn.Module) and named_tensors(value):
                return value
            if id(value) not in seen:
                seen[id(value)] = value
                following += islice(_within(value), _VALUES)
        values = following[:_VALUES]
    return None


def _within(value: Any) -> Iterable[Any]:
    """Return the modules that a value may act with."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        loads = {i.argval for i in dis.get_instructions(value) if i.opname == "LOAD_GLOBAL"}
        used = [held for name, held in value.__globals__.items() if name in loads]
        enclosed = inspect.getclosurevars(value).nonlocals.values()
        return (*used, *enclosed, *(value.__defaults__ or ()))
    if isinstance(value, (type, ModuleType, nn.Module, Tensor)):
        return ()
    slots = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
    return (
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name, None) for name in slots),
    )


# How far from a policy modules are looked for, and among how many values at each step.
_STEPS = 4
_VALUES = 1000


def is_lazy(policy: Any) -> bool:
    """Return whether a policy, or the module that it calls, has tensors without a shape."""
    module = called_module(policy)
    return module is not None and any(
        map(is_lazy_tensor, itertools.chain(module.parameters(), module.buffers()))
    )


def initialise(act: TensorPolicy | TensorDictPolicy, env: Env) -> None:
    """Act once in an environment, which is reset for that.

    Raises:
        ModelError: the policy calls the ``forward()`` of a lazy module directly.
    """
    try:
        with torch.no_grad():
            act(env.reset().copy())
    except ValueError as error:
        # torch has no class for this.
        if "uninitialized parameter" not in str(error):
            raise
        raise ModelError(
            "the policy calls forward() of a lazy module by itself, which gives no shapes; let it "
            "call the module, or run that once before"
        ) from error
