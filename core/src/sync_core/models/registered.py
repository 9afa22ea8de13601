"""Trained tensors that a model's modules do not register, so that no send would bring them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType, NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn

from sync_core.errors import ModelError, OptionError
from sync_core.models.extract import Gathered, Strategy, held_tensors, named_tensors
from sync_core.models.lookup import is_tensordict, leaves, modules_in
from sync_core.models.memory import end_of

# What every module has; and the parameters that an RNN lists a second time.
_OF_ANY_MODULE = frozenset({*vars(nn.Module()), "_flat_weights"})
# Most attributes are of these types, and hold nothing.
_HOLD_NOTHING = (bool, int, float, str, NoneType, FunctionType)


def check_allowed(allowed: Any) -> None:
    """Raise `OptionError` unless these can be given as ``allow_unregistered``."""
    if not isinstance(allowed, (list, tuple)):
        raise OptionError(
            "allow_unregistered must be a list of modules and tensors, such as [critic], got a "
            f"{type(allowed).__name__}"
        )
    for value in allowed:
        if not isinstance(value, (Tensor, nn.Module, dict)) and not is_tensordict(value):
            raise OptionError(
                "allow_unregistered must hold modules and tensors, such as [critic], got a "
                f"{type(value).__name__}: {value!r:.80}"
            )


def check_registered(model: Any, strategy: Strategy, allowed: Sequence[Any] = ()) -> None:
    """Raise `ModelError` where a module trains a tensor that would not be sent.

    Those are leaves that require a gradient: tensors in attributes, and in lists, tuples, sets,
    dicts and TensorDicts there; those of modules in such places, unless these contain the model;
    and parameters that an own `named_parameters` leaves out.

    Args:
        model: what a sender reads.
        strategy: how it reads modules; with ``"state_dict"`` a module selects its parameters.
        allowed: modules and tensors that need not be sent.
    """
    if isinstance(model, Gathered):
        model, strategy = model.model, "state_dict"
    if not (roots := modules_in(model)):
        return
    by_state_dict = strategy == "state_dict"
    named = named_tensors(model, strategy) if by_state_dict else held_tensors(model)
    sent = [*named.values(), *(found.tensor for found in _reachable([("", tuple(allowed))]))]
    known = set(map(id, sent))
    for path, tensor, owner, is_registered in _reachable(roots):
        if id(tensor) in known or not tensor.requires_grad or not tensor.is_leaf:
            continue
        if (is_registered and by_state_dict) or tensor.is_meta or _covers(sent, tensor):
            continue
        kind = type(owner).__name__
        if is_registered:
            raise ModelError(
                f"{path!r} is a parameter of a {kind}, and named_parameters of the model leaves it "
                "out, so it would not be sent; let named_parameters return all of them, or type "
                "Sender(…, strategy='state_dict') or requires_grad_(False) for what is not trained"
            )
        raise ModelError(
            f"{path!r} requires a gradient, and is not registered by its module (a {kind}), so it "
            "would not be sent; register it: nn.Parameter(…) for a tensor, nn.ParameterList or "
            "nn.ParameterDict for several, nn.ModuleList or nn.ModuleDict for modules; type "
            "requires_grad_(False) for what is not trained. If another sender sends it, or no "
            "worker uses it, type Sender(…, allow_unregistered=[…])"
        )


class _Reached(NamedTuple):
    """A tensor, and the expression that leads to it from a model."""

    path: str
    tensor: Tensor
    #: The module that has it; None for none.
    owner: nn.Module | None
    #: Whether it is a parameter of the model or of a registered submodule.
    is_registered: bool


def _reachable(roots: Iterable[tuple[str, Any]]) -> Iterator[_Reached]:
    """The tensors that modules and containers hold, but for registered buffers.

    Args:
        roots: prefixes, each with a module or a container.
    """
    roots = list(roots)
    around = {id(value) for _, value in roots}
    # The objects too, so that no other gets one of these ids.
    seen: dict[int, Any] = {}
    # Registered modules come first, as others may refer to them.
    registered = deque(roots)
    others: deque[tuple[str, Any, nn.Module | None]] = deque()
    while registered or others:
        is_registered = bool(registered)
        path, value, owner = (*registered.popleft(), None) if registered else others.popleft()
        if id(value) in seen:
            continue
        if isinstance(value, Tensor):
            yield _Reached(path, value, owner, is_registered=False)
        elif isinstance(value, nn.Module):
            # A module around the model, such as its parent, has other tensors.
            if not is_registered and not around.isdisjoint(map(id, value.modules())):
                continue
            prefix = path if is_registered else f"{path}."
            for key, parameter in value._parameters.items():
                if parameter is not None:
                    yield _Reached(f"{prefix}{key}", parameter, value, is_registered)
            for key, module in value._modules.items():
                if is_registered:
                    registered.append((f"{prefix}{key}.", module))
                else:
                    others.append((f"{prefix}{key}", module, value))
            others += (
                (f"{prefix}{key}", held, value)
                for key, held in list(vars(value).items())
                if not isinstance(held, _HOLD_NOTHING) and key not in _OF_ANY_MODULE
            )
        else:
            others += (
                (f"{path}[{key!r}]", held, owner)
                for key, held in _parts(value)
                if not isinstance(held, _HOLD_NOTHING)
            )
        seen[id(value)] = value


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and values of a container; nothing for another object."""
    if is_tensordict(value):
        return list(leaves(value))
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return enumerate(list(value))
    return ()


def _covers(sent: Iterable[Tensor], tensor: Tensor) -> bool:
    """Return whether the memory of a tensor is that of tensors sent, as of a detached one."""
    if not tensor.numel():
        return True
    reached, end = _span(tensor)
    spans = sorted(_span(one) for one in sent if one.numel() and one.device == tensor.device)
    for start, stop in spans:
        if start <= reached < stop:
            reached = stop
    return bool(reached) and reached >= end


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses at which a tensor begins and ends; zeros for one without memory."""
    with suppress(Exception):
        if start := tensor.data_ptr():
            return start, end_of(tensor)
    return 0, 0
