"""Moves a model's tensors side by side in memory, so that whoever sends it packs bytes."""

from __future__ import annotations

from typing import TypeVar

from sync_core.models.binding import Binding

Model = TypeVar("Model")


def consolidate(model: Model) -> Model:
    """Move the tensors of a module into one stretch of memory, in which they lie as they travel.

    A `Sender` of that model then packs by copying bytes instead of thousands of tensors; a scheme
    may also send them from where they are. Parameters keep their identity, and optimisers go on
    with them. If the module gets other tensors, or one is moved (`module.to`), it is sent tensor by
    tensor again.

    Call this before other threads use the module, and before anything else holds the memory of
    its tensors: nothing is moved then. The memory cannot be resized.

    Args:
        model: an `nn.Module`; or a mapping from names to modules, if that is what is sent.

    Returns:
        The model.

    Raises:
        ModelError: a tensor that cannot be moved, or whose memory something else holds (a
            `state_dict`, a view, an array, a backward pass that is still to come); the message
            names it, and nothing was moved. An array that a tensor was made on
            (`torch.from_numpy`) is not seen, and goes on looking at the old memory.

    Example:
        >>> policy = consolidate(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)))
        >>> with Sender("thread", policy, num_workers=1) as sender:
        ...     pending = sender.send_async()
        ...     version = Receiver(sender.address(0), torch.nn.Sequential(
        ...         torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))).receive()
        ...     pending.wait().updated
        (0,)
    """
    Binding(model).consolidate()
    return model
