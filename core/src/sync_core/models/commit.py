"""Writes weights into a model: everything, or nothing when something fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sync_core.errors import ModelError
from sync_core.models.extract import non_persistent_buffers
from sync_core.models.modules import (
    flatten,
    is_extra_state,
    modules_with_extra_state,
    plain_name,
    rebuild,
)
from sync_core.weights.copying import writing_to
from sync_core.weights.layout import QUANTIZED, place_of

#: Modules, each with the prefix that the names of its tensors have.
Modules = Sequence[tuple[str, nn.Module]]


def drop_derived_weights() -> None:
    """Drop what torch keeps of weights for a region of code, since they were written to.

    Those are the casts of `torch.autocast`, and the values of `parametrize.cached()`; of all
    threads, each of which derives them again.
    """
    torch.clear_autocast_cache()
    # It has no public name. Without it, values stay until the outermost region ends.
    cached = getattr(parametrize, "_cache", None)
    if isinstance(cached, dict):
        cached.clear()


def own_memory(
    named: Mapping[str, Tensor], lent: Sequence[Tensor], ties: Mapping[str, str] | None = None
) -> None:
    """Give every tensor that views the memory of ``lent`` its own copy, tied ones the same.

    A tensor whose memory was taken away, as sharding does, stays without.

    Args:
        named: the tensors.
        lent: those whose memory is another's.
        ties: the names of tied tensors, and of those that they are tied to. None where that is not
            known: those that view the same memory count as tied.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in lent} - {0}
    copies: dict[object, Tensor] = {}
    # In inference mode they would be given memory that cannot be trained.
    with torch.inference_mode(mode=False):
        for name, tensor in named.items():
            if tensor.untyped_storage().data_ptr() in memory:
                place = place_of(tensor) if ties is None else ties.get(name, name)
                if place not in copies:
                    copies[place] = tensor.data.clone()
                tensor.data = copies[place]


@contextmanager
def extra_state_set(modules: Modules, named: Mapping[str, Tensor]) -> Iterator[None]:
    """Set the extra state of modules; put the old one back in all of them if anything raises."""
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for prefix, root in modules:
            for suffix, module in modules_with_extra_state(root):
                name, old = prefix + suffix, module.get_extra_state()
                # A copy, since a module may write what it is given into what it has.
                replaced.append((module, rebuild(name, old, dict(flatten(name, old)))))
                module.set_extra_state(rebuild(name, old, named))
        yield
    except BaseException:
        # Backwards, since a module that two models share was set twice.
        for module, old in reversed(replaced):
            module.set_extra_state(old)
        raise


def load_state_dicts(modules: Modules, named: Mapping[str, Tensor]) -> None:
    """Load through each module's own `load_state_dict`; put all old weights back if one raises."""
    with ExitStack() as stack:
        for prefix, module in modules:
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in named.items()
                if name.startswith(prefix) and not is_extra_state(name)
            }
            stack.enter_context(_put_back_on_error(module))
            _load_state_dict(module, own)


def _load_state_dict(module: nn.Module, named: Mapping[str, Tensor]) -> None:
    state, others = module.state_dict(), non_persistent_buffers(module)
    with writing_to(_tensors(state | others).values()):
        for name, buffer in others.items():
            if name in named:
                buffer.copy_(named[name])
        plain = plain_name(module)
        # Copies, since a module may keep what it loads, and the memory is another version's later.
        given = {key: named[plain(key)].clone() for key in state if plain(key) in named}
        refused = module.load_state_dict(given, strict=False).unexpected_keys
    if refused:
        raise ModelError(
            f"the model's state_dict has {refused[0]!r}, which its load_state_dict does not take, "
            f"as those of quantized modules: {QUANTIZED}; or let a module of your own load it"
        )


@contextmanager
def _put_back_on_error(module: nn.Module) -> Iterator[None]:
    state = _tensors(module.state_dict() | non_persistent_buffers(module))
    backup = {name: value.clone() for name, value in state.items()}
    try:
        yield
    except BaseException:
        current = _tensors(module.state_dict() | non_persistent_buffers(module))
        with writing_to(current.values()):
            for name, value in backup.items():
                current[name].copy_(value)
        raise


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
