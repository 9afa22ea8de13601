"""The weights to act with, of optimizers that train with other ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sync_core import OptionError

# Methods that put the weights to act with into the model, and methods that undo that: those of
# schedule-free optimizers, and two spellings of Lookahead's.
_SWAPS = (
    ("eval", "train"),
    ("backup_and_load_cache", "clear_and_load_backup"),
    ("_backup_and_load_cache", "_clear_and_load_backup"),
)
# Methods that return a context manager for that: of torch_ema, and of NeMo's EMAOptimizer.
_BLOCKS = ("average_parameters", "swap_ema_weights")


def optimizer_weights(optimizer: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return what ``Sender(…, before_read=…)`` takes, so that workers get the weights to act with.

    Some optimizers leave weights in the model that are only to train with: schedule-free ones until
    their ``eval()``, Lookahead, SAM between its two steps, and moving averages such as
    ``torch_ema.ExponentialMovingAverage``. Each send has the weights to act with in the model while
    it reads, and puts every parameter back bit for bit, so that training continues as without the
    send. This takes the memory of one more copy of the parameters.

    Args:
        optimizer: the optimizer or the moving average; also wrapped by accelerate.

    Raises:
        OptionError: the optimizer trains with the weights to act with, as most do.

    Example:
        >>> class ScheduleFree(torch.optim.SGD):
        ...     @torch.no_grad()
        ...     def eval(self):
        ...         for parameter in self.param_groups[0]["params"]:
        ...             parameter.mul_(0.5)
        ...     def train(self): ...
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> trained = model.weight.detach().clone()
        >>> to_act_with = optimizer_weights(ScheduleFree(model.parameters(), lr=0.1))
        >>> with to_act_with():
        ...     torch.equal(model.weight, trained / 2)
        True
        >>> torch.equal(model.weight, trained)
        True
    """
    found = acting_weights(optimizer)
    if found is None:
        raise OptionError(
            "optimizer_weights needs an optimizer with the methods eval() and train(), "
            f"{_SWAPS[1][0]}() and {_SWAPS[1][1]}(), {_BLOCKS[0]}() or {_BLOCKS[1]}(), or a SAM; a "
            f"{type(optimizer).__name__} has none: leave before_read= out, or give a function that "
            "returns a context manager"
        )
    return found


def acting_weights(optimizer: Any) -> Callable[[], AbstractContextManager[None]] | None:
    """Return what `optimizer_weights` does; None where the model has the weights to act with."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    for begin, end in _SWAPS:
        if callable(getattr(optimizer, begin, None)) and callable(getattr(optimizer, end, None)):
            return partial(_swapped, optimizer, begin, end)
    for name in _BLOCKS:
        if callable(getattr(optimizer, name, None)):
            block: Callable[[], AbstractContextManager[None]] = getattr(optimizer, name)
            return block
    return partial(_before_sam, optimizer) if "SAM" in type(optimizer).__name__ else None


@contextmanager
def _swapped(optimizer: Any, begin: str, end: str) -> Iterator[None]:
    """Call one method, and the other one at the end."""
    groups = optimizer.param_groups
    # Schedule-free optimizers note in each group which weights the model has.
    if begin == "eval" and not all(group.get("train_mode", True) for group in groups):
        yield
        return
    with _put_back([parameter for group in groups for parameter in group["params"]]):
        getattr(optimizer, begin)()
        try:
            yield
        finally:
            getattr(optimizer, end)()


@contextmanager
def _before_sam(optimizer: Any) -> Iterator[None]:
    """Have the weights from which SAM has taken its first step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Between the steps, SAM keeps these weights; after them, the entry is the parameter's memory.
    kept = {p: optimizer.state[p]["old_p"] for p in parameters if "old_p" in optimizer.state[p]}
    with _put_back(list(kept)), torch.no_grad():
        for parameter, before in kept.items():
            parameter.copy_(before)
        yield


@contextmanager
def _put_back(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters at the end the values that they have now."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
