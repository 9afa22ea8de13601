"""The layer ``finite``: no worker commits a version with NaN or infinite values."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from sync_core import BindContext, ModelError, SendContext, Update, hookimpl

_NAMES_SHOWN = 8


class Finite:
    """Refuses a version with NaN or infinite values before it leaves. Named ``finite``.

    The send raises `ModelError`, which names the tensors, and workers keep the version that they
    have. Give it first, so that it sees the trainer's values.

    Example:
        >>> from sync_core import Sender
        >>> model = torch.nn.Linear(2, 1)
        >>> with Sender("thread", model, num_workers=1, layers=["finite"]) as sender:
        ...     model.bias.data[0] = float("nan")
        ...     sender.send()
        Traceback (most recent call last):
        sync_core.errors.ModelError: version 1 of 'policy' has values that are NaN or infinite, in \
'bias'; no worker was sent it
    """

    def bind(self, context: BindContext) -> Finite:
        """Return this layer, which keeps no state."""
        del context
        return self

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Look at every floating-point value.

        Raises:
            ModelError: one is not finite.
        """
        update = yield
        if context.version and (wrong := list(_not_finite(update))):
            more = [f"… {len(wrong) - _NAMES_SHOWN} more"] if len(wrong) > _NAMES_SHOWN else []
            names = ", ".join([*map(repr, wrong[:_NAMES_SHOWN]), *more])
            raise ModelError(
                f"version {context.version} of {context.model_id!r} has values that are NaN or "
                f"infinite, in {names}; no worker was sent it"
            )
        return update


def _not_finite(update: Update) -> Iterator[str]:
    """Return the names of the tensors with such values."""
    read, sums = [], []
    for spec, tensor in zip(update.layout.specs, update.tensors, strict=True):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            values = _values(tensor.detach())
            # A sum of finite values that is too large is looked at once more.
            wide = torch.promote_types(values.dtype, torch.float32)
            read.append((spec.name, values))
            sums.append(values.sum(dtype=wide).double())
    for device in {each.device for each in sums}:
        here = [i for i, each in enumerate(sums) if each.device == device]
        # One transfer for each device.
        finite = torch.stack([sums[i] for i in here]).isfinite().tolist()
        for i in (i for i, is_finite in zip(here, finite, strict=True) if not is_finite):
            name, values = read[i]
            if not values.isfinite().all():
                yield name


def _values(tensor: Tensor) -> Tensor:
    """Return real values of a dtype that torch can add up."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor
