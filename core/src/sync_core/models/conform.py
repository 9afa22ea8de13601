"""Puts weights given by hand into the order and the ties of the layout that was agreed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sync_core.errors import LayoutMismatchError
from sync_core.models.compare import check_match
from sync_core.weights.layout import Layout, place_of
from sync_core.weights.update import Update


def conform(named: Mapping[str, Tensor], layout: Layout, *, partial: bool) -> Update:
    """An update of the named tensors that fits ``layout``.

    Args:
        named: the weights.
        layout: the layout of the model that they are for.
        partial: whether some may be missing; the update then has a layout of its own.

    Raises:
        ModelError: a tensor that cannot travel.
        LayoutMismatchError: a name, dtype or shape differs, or tied tensors hold two values.
    """
    given = Update.of(named)
    untied = Layout(layout.specs)
    tied = dict(layout.aliases)
    for name, owner in tied.items():
        if name in named and owner in named and not holds_same(named[name], named[owner]):
            raise LayoutMismatchError(
                f"{name!r} and {owner!r} are one tensor in the model, "
                "and hold different values in the weights; nothing was sent"
            )
    firsts = {tied.get(name, name): tensor for name, tensor in reversed(list(named.items()))}
    whole = len(firsts) == len(layout.specs)
    check_match(Layout.of(firsts), untied, partial=partial)
    if not whole:
        return given
    tensors = [firsts[spec.name] for spec in layout.specs]
    return Update(layout.with_tensors(tensors), tensors)


def holds_same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same dtype and shape, and the same values bit by bit."""
    if place_of(left) == place_of(right):
        return True
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    # NaN is equal to nothing, and torch compares not all dtypes.
    return torch.equal(_bits(left), _bits(right.to(left.device)))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element is contiguous whatever its stride, which a view of its bytes has to lose.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
