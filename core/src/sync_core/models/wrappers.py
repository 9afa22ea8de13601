"""Names of tensors without the prefixes of `torch.compile` and of data-parallel wrappers.

A compiled module has its tensors under ``_orig_mod.``, and `DistributedDataParallel` and
`DataParallel` have theirs under ``module.``. Both sides of a send leave these prefixes out, at any
depth, so that a wrapped model fits a plain one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_COMPILED = "_orig_mod"
_PARALLEL = "module"
#: The parts of names that come from wrappers, and these wrappers.
WRAPPERS = {
    _COMPILED: "torch.compile",
    _PARALLEL: "DistributedDataParallel or DataParallel",
}


def plain_name(module: nn.Module) -> Callable[[str], str]:
    """Return the function that removes the prefixes of wrappers from names of a module's tensors.

    Example:
        >>> parallel = torch.nn.DataParallel(torch.nn.Linear(2, 1))
        >>> list(map(plain_name(parallel), parallel.state_dict()))
        ['weight', 'bias']
    """
    compiled = _compiled_type()
    prefixes: list[tuple[str, str]] = []
    for name, submodule in module.named_modules(remove_duplicate=False):
        outer = f"{name}." if name else ""
        if isinstance(submodule, compiled):
            prefixes.append((f"{outer}{_COMPILED}.", outer))
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


def _compiled_type() -> type[nn.Module] | tuple[()]:
    """Return the type of compiled modules; it has no public name, and no instance before import.

    Where torch names it otherwise, nothing is removed, and the error about names says what to do.
    """
    found: type[nn.Module] | tuple[()] = getattr(
        sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ()
    )
    return found
