"""The layer `Select`: after a whole version, only the tensors that change travel."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor, nn

from sync_core import BindContext, Layout, ModelError, SendContext, Update, hookimpl
from sync_core.models import TensorState, states


class Select:
    """Sends some of a model's tensors, once the workers have all of them.

    The first version is whole. A worker that joins later, or has not confirmed the last whole
    version, gets a whole version with the next send, and so do all if a tensor that is left out
    was changed. Changes that torch does not count (through ``.data``, or in numpy) are noticed by
    a sample of each tensor, 64 elements or more: after one of single elements, make a new sender.

    Each version brings a digest of what it leaves out. A worker whose tensors have another one
    refuses the version, and gets a whole one with the next send. The digest is made of every whole
    version, and compared again where a worker's tensors were changed.

    Args:
        names: patterns of the names of the tensors to send; ``*`` stands for anything.
        trainable: send the parameters that require a gradient, and all buffers, as is done where no
            names are given.
        send_rest: whether the first version is whole. If not, workers must have what is left out
            from the start, such as the checkpoint that the trainer began with; the digest proves
            it, and a worker that does not have it refuses every version.

    Raises:
        ValueError: both names and ``trainable`` were given.

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

    def __init__(self, *names: str, trainable: bool = False, send_rest: bool = True) -> None:
        if trainable and names:
            raise ValueError(f"give patterns or trainable=True, and not both: {names}")
        self.capabilities = frozenset({"partial"} if send_rest else {"partial", "held"})
        self._send_rest = send_rest
        self._names = names
        self._patterns = [re.compile(".*".join(map(re.escape, name.split("*")))) for name in names]
        # The last whole version, its layout, and the changes counted of what is left out.
        self._known: tuple[int, Layout, dict[str, TensorState]] = 0, Layout(()), {}

    def bind(self, context: BindContext) -> Select:
        """A layer without a past, for one sender."""
        del context
        return Select(*self._names, trainable=not self._names, send_rest=self._send_rest)

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Leave out the tensors that the workers have.

        Raises:
            ModelError: nothing would be sent; or a tensor has changed that workers must have from
                the start.
        """
        update = yield
        layout, tensors = update.layout, update.tensors
        chosen = tuple(i for i in range(len(tensors)) if self._is_chosen(layout, tensors, i))
        if not chosen:
            raise ModelError(self._describe_none(layout, context.model))
        left_out = sorted(set(range(len(tensors))) - set(chosen))
        found = states([tensors[i] for i in left_out])
        changes = {layout.specs[i].name: each for i, each in zip(left_out, found, strict=True)}
        if context.version == 0:
            self._keep(0, layout, changes)
        elif self._can_leave_out(context, layout, changes):
            update.become(layout.subset(chosen), [tensors[i] for i in chosen])
            update.base = max(update.base, self._known[0])
        elif self._send_rest:
            self._keep(context.version, layout, changes)
        else:
            known = self._known[2]
            changed = min(name for name in changes if changes[name] != known.get(name))
            raise ModelError(self._describe_changed(changed))
        return update

    def _keep(self, version: int, layout: Layout, changes: dict[str, TensorState]) -> None:
        for state in changes.values():
            state.settle()
        self._known = version, layout, changes

    def _describe_none(self, layout: Layout, model: Any) -> str:
        """Return what is wrong where nothing was chosen."""
        del model
        reason = f"no name matches {self._names}" if self._names else "none requires a gradient"
        return (
            f"the layer Select chooses none of {len(layout.names)} tensors: {reason}; give "
            f"patterns of their names, such as select({layout.names[0]!r})"
        )

    def _describe_changed(self, name: str) -> str:
        """Return what is wrong where a tensor was changed that is never sent."""
        return (
            f"{name!r}, which the layer Select leaves out, was changed after the sender was made, "
            "and send_rest=False does not send it; make a new sender, or leave that out"
        )

    def _is_chosen(self, layout: Layout, tensors: Sequence[Tensor], position: int) -> bool:
        if self._patterns:
            name = layout.specs[position].name
            return any(pattern.fullmatch(name) for pattern in self._patterns)
        tensor = tensors[position]
        return tensor.requires_grad or not isinstance(tensor, nn.Parameter)

    def _can_leave_out(
        self, context: SendContext, layout: Layout, changes: dict[str, TensorState]
    ) -> bool:
        version, known_layout, known = self._known
        if not self._send_rest:
            return changes.items() <= known.items()
        # It is empty where a receiver asks a function for the weights, and gets them whole.
        held = context.acknowledged.values()
        seen = version > 0 and bool(held) and min(held) >= version
        return seen and (known_layout, known) == (layout, changes)
