"""Weights that are made tensor by tensor at a send, and never exist all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from sync_core import Layout, ModelError, OptionError
from sync_core.models import ComputedWeights, Strategy, TensorStream

#: Name, dtype and shape of a tensor.
Spec: TypeAlias = "tuple[str, torch.dtype, Sequence[int]]"


class Stream(ComputedWeights):
    """Weights as an iterator makes them: names, dtypes and shapes first, then the tensors.

    Each tensor is packed before the next is asked for, so a model that is gathered, merged or
    converted tensor by tensor never exists a second time beside the packed version. The schemes
    ``chunked`` and ``dist`` send what is packed while the rest is made. A layer that changes
    tensors needs all of them, and has them packed in memory first.

    Args:
        specs: name, dtype and shape of each tensor.
        tensors: the tensors in the order of ``specs``, or pairs of name and tensor: an iterable,
            or a function without arguments that returns one. A generator serves one send. A tensor
            must stay as it is until the next is asked for.
        tied: by the name of a tied tensor, the name under which it travels.
        model: the model that they come from, which layers get as ``SendContext.model``.

    Raises:
        ModelError: ``specs`` has no tensor, a name twice, or something that cannot travel; or
            ``tied`` names a tensor that ``specs`` does not have.

    A send raises `sync_core.ModelError` with the tensor's name where the source raises, ends too
    early, or gives another tensor than ``specs`` says. No worker commits that version then, and the
    next send works.

    Example:
        >>> from sync_core import Receiver, Sender
        >>> policy, copy = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> specs = [(name, p.dtype, p.shape) for name, p in policy.named_parameters()]
        >>> stream = Stream(specs, policy.named_parameters)
        >>> with Sender("thread", stream, num_workers=1) as sender:
        ...     pending = sender.send_async()
        ...     Receiver(sender.address(0), copy).receive(), torch.equal(policy.weight, copy.weight)
        (1, True)
    """

    def __init__(
        self,
        specs: Iterable[Spec],
        tensors: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        tied: Mapping[str, str] = MappingProxyType({}),
        model: Any = None,
    ) -> None:
        super().__init__(model)
        self._layout = _layout(specs, tied)
        if not callable(tensors) and not isinstance(tensors, Iterable):
            raise OptionError(
                "tensors must be an iterable of tensors or a function that returns one, got a "
                f"{type(tensors).__name__}"
            )
        self._tensors = tensors

    def read(self, strategy: Strategy) -> TensorStream:
        """Return the stream of one version; nothing is made yet."""
        del strategy
        return TensorStream(self._layout, self._begin)

    def _begin(self) -> Iterable[Any]:
        tensors = self._tensors
        return tensors() if callable(tensors) else tensors


def _layout(specs: Iterable[Spec], tied: Mapping[str, str]) -> Layout:
    # The layout checks what travels, by tensors that take no memory.
    named: dict[str, torch.Tensor] = {}
    for spec in specs:
        try:
            name, dtype, shape = spec
            stand_in = torch.zeros((), dtype=dtype, device="cpu").expand(tuple(shape))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                "specs must be triples such as ('weight', torch.float32, (4, 2)), got "
                f"{spec!r:.200}"
            ) from error
        if name in named:
            raise ModelError(f"specs has {name!r} twice")
        # Two stand-ins never share memory, so none is taken for a tied tensor.
        named[name] = stand_in
    if not named:
        raise ModelError("specs has no tensors, so there is nothing to send")
    Layout.of(named)
    for name, owner in tied.items():
        if owner not in named or name in named:
            raise ModelError(
                f"tied has {name!r}: {owner!r}; specs must have the second, and not the first"
            )
    kinds = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()]
    return Layout.of_kinds(kinds, tied.items())
