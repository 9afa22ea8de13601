"""Wrapped modules: names without the prefixes of wrappers, and wrappers that cannot be read.

A compiled module has its tensors under ``_orig_mod.``, `DistributedDataParallel` and
`DataParallel` have theirs under ``module.``, and activation checkpointing under
``_checkpoint_wrapped_module.``. Both sides of a send leave these prefixes out, at any depth, so
that a wrapped model fits a plain one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sync_core.errors import ModelError

_COMPILED = "_orig_mod"
_PARALLEL = "module"
_CHECKPOINTED = "_checkpoint_wrapped_module"
#: The parts of names that come from wrappers, and these wrappers.
WRAPPERS = {
    _COMPILED: "torch.compile",
    _PARALLEL: "DistributedDataParallel or DataParallel",
    _CHECKPOINTED: "activation checkpointing",
}


def plain_name(module: nn.Module) -> Callable[[str], str]:
    """Return the function that removes the prefixes of wrappers from names of a module's tensors.

    Example:
        >>> parallel = torch.nn.DataParallel(torch.nn.Linear(2, 1))
        >>> list(map(plain_name(parallel), parallel.state_dict()))
        ['weight', 'bias']
    """
    compiled = _type_of("torch._dynamo.eval_frame", "OptimizedModule")
    checkpointed = _type_of(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"
    )
    prefixes: list[tuple[str, str]] = []
    for name, submodule in module.named_modules(remove_duplicate=False):
        outer = f"{name}." if name else ""
        if isinstance(submodule, compiled):
            prefixes.append((f"{outer}{_COMPILED}.", outer))
        elif isinstance(submodule, checkpointed):
            prefixes.append((f"{outer}{_CHECKPOINTED}.", outer))
        elif isinstance(submodule, (DataParallel, DistributedDataParallel)):
            prefixes.append((f"{outer}{_PARALLEL}.", outer))
    if not prefixes:
        return str
    # The innermost first, so that the prefixes of those around it still are in the name.
    prefixes.sort(key=lambda pair: len(pair[0]), reverse=True)

    def strip(name: str) -> str:
        for prefix, outer in prefixes:
            if name.startswith(prefix):
                name = outer + name.removeprefix(prefix)
        return name

    return strip


def check_flat(module: nn.Module) -> None:
    """Raise `ModelError` for FSDP1, whose parameters are parts of flat ones."""
    flat = _type_of("torch.distributed.fsdp", "FullyShardedDataParallel")
    if any(isinstance(submodule, flat) for submodule in module.modules()):
        raise ModelError(
            "the module is wrapped by FullyShardedDataParallel (FSDP1), which replaces its "
            "parameters by flat ones; shard it with torch.distributed.fsdp.fully_shard and type "
            "Sender(scheme, gathered(model)), or send a full state_dict: "
            "FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
        )


def check_sharded(module: nn.Module) -> None:
    """Raise `ModelError` for FSDP2, whose last forward may have left its parameters whole."""
    sharded = _type_of("torch.distributed.fsdp", "FSDPModule")
    if any(isinstance(submodule, sharded) for submodule in module.modules()):
        raise ModelError(
            "the module is sharded by fully_shard (FSDP2), so that this rank has parts of its "
            "tensors; to send it, type Sender(scheme, gathered(model)) on every rank; for a worker "
            "with such a model, type Sender(Sharded(scheme, rank, size), …)"
        )


def _type_of(module: str, name: str) -> type[nn.Module] | tuple[()]:
    """Return a type of torch's; it has no instance before its module is imported.

    Those of compiled modules and of activation checkpointing have no public name. Where torch
    names them otherwise, nothing is removed, and the error about names says what to do.
    """
    found: type[nn.Module] | tuple[()] = getattr(sys.modules.get(module), name, ())
    return found
