"""The layer `Select`: after a whole version, only the tensors that change travel."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

from torch import Tensor, nn

from sync_core import BindContext, Layout, ModelError, SendContext, Update, hookimpl


class Select:
    """Sends some of a model's tensors, once the workers have all of them.

    The first version is whole. A worker that joins later, or has not confirmed the last whole
    version, gets a whole version with the next send, and so do all if a tensor that is left out
    was changed in place. Changes that torch does not count (through ``.data``, or in numpy) are
    not seen: make a new sender after those.

    Args:
        names: patterns of the names of the tensors to send; ``*`` stands for anything.
        trainable: send the parameters that require a gradient, and all buffers.

    Raises:
        ValueError: both were given, or neither.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender
        >>> source, target = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        ...                   for _ in range(2))
        >>> frozen = source[0].requires_grad_(False)
        >>> nbytes = []
        >>> with Sender("thread", source, num_workers=1, layers=[Select(trainable=True)]) as sender:
        ...     receiver = Receiver(sender.address(0), target)
        ...     for _ in range(2):
        ...         pending = sender.send_async()
        ...         version = receiver.receive()
        ...         nbytes.append(pending.wait().nbytes)
        >>> nbytes[0] > 10 * nbytes[1], torch.equal(source[1].weight, target[1].weight)
        (True, True)
    """

    capabilities = frozenset({"partial"})

    def __init__(self, *names: str, trainable: bool = False) -> None:
        if trainable is bool(names):
            raise ValueError('give patterns, such as Select("*.lora_*"), or trainable=True')
        self._names = names
        self._patterns = [re.compile(".*".join(map(re.escape, name.split("*")))) for name in names]
        # The last whole version, its layout, and the changes counted of what is left out.
        self._whole: tuple[int, Layout, int] | None = None

    def bind(self, context: BindContext) -> Select:
        """A layer without a past, for one sender."""
        del context
        return Select(*self._names, trainable=not self._names)

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Leave out the tensors that the workers have.

        Raises:
            ModelError: nothing would be sent.
        """
        update = yield
        layout, tensors = update.layout, update.tensors
        chosen = tuple(i for i in range(len(tensors)) if self._is_chosen(layout, tensors, i))
        if not chosen:
            raise ModelError(f"the layer Select chooses none of {len(tensors)} tensors")
        if context.version == 0:
            return update
        left_out = set(range(len(tensors))) - set(chosen)
        changes = sum(tensors[i]._version for i in left_out)
        if self._can_leave_out(context, layout, changes):
            assert self._whole is not None
            update.become(layout.subset(chosen), [tensors[i] for i in chosen])
            update.base = max(update.base, self._whole[0])
        else:
            self._whole = context.version, layout, changes
        return update

    def _is_chosen(self, layout: Layout, tensors: Sequence[Tensor], position: int) -> bool:
        if self._patterns:
            name = layout.specs[position].name
            return any(pattern.fullmatch(name) for pattern in self._patterns)
        tensor = tensors[position]
        return tensor.requires_grad or not isinstance(tensor, nn.Parameter)

    def _can_leave_out(self, context: SendContext, layout: Layout, changes: int) -> bool:
        if self._whole is None or self._whole[1:] != (layout, changes):
            return False
        return all(version >= self._whole[0] for version in context.acknowledged.values())
