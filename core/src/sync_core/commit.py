"""Writes weights into a model: everything, or nothing when something fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sync_core.errors import ModelError
from sync_core.extra_state import modules_with_extra_state, rebuild


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target, in one fused copy."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def own_memory(named: Mapping[str, Tensor], lent: Sequence[Tensor]) -> None:
    """Give every tensor that views the memory of ``lent`` a copy of its own."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in lent}
    for tensor in named.values():
        if tensor.untyped_storage().data_ptr() in memory:
            tensor.data = tensor.data.clone()


def check_writable(named: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` for a tensor whose elements share memory."""
    for name, tensor in named.items():
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.numel() > 1 and any(size > 1 and stride == 0 for size, stride in sizes):
            raise ModelError(
                f"{name!r} was made by expand(): its elements share memory and cannot be written "
                "one by one; clone() it first"
            )


@contextmanager
def extra_state_set(model: nn.Module, named: Mapping[str, Tensor]) -> Iterator[None]:
    """Set the extra state of the model's modules; put the old one back if anything raises."""
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for name, module in modules_with_extra_state(model):
            old = module.get_extra_state()
            replaced.append((module, rebuild(name, old, {})))
            module.set_extra_state(rebuild(name, old, named))
        yield
    except BaseException:
        for module, old in replaced:
            module.set_extra_state(old)
        raise


def load_state_dict(model: nn.Module, named: Mapping[str, Tensor]) -> None:
    """Load through the module's own `load_state_dict`; put the old weights back if it raises."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    state = model.state_dict()
    backup = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    try:
        with torch.no_grad():
            for name, buffer in buffers.items():
                if name not in state and name in named:
                    backup[name] = buffer.clone()
                    buffer.copy_(named[name])
        model.load_state_dict({k: v for k, v in named.items() if k in state}, strict=False)
    except BaseException:
        with torch.no_grad():
            current = model.state_dict() | buffers
            for name, value in backup.items():
                current[name].copy_(value)
        raise
