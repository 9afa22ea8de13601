"""The layer `fp8`: weights travel in one byte each, with a scale for each row."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from sync_core import Update, hookimpl

__version__ = "0.1.0"

_WIRE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_WIRE).max
_SCALE = "__fp8_scale__."


class Float8:
    """Matrices of 16 bits and more travel as float8 (e4m3) and a scale for each of their rows."""

    @hookimpl(wrapper=True)
    def prepare_weights(self, update: Update) -> Generator[None, Update, Update]:
        """Scale each row to the range of the eight bits."""
        del update
        prepared = yield
        scales: dict[str, Tensor] = {}
        for spec, tensor in zip(prepared.layout.specs, prepared.tensors, strict=True):
            if _shrinks(tensor):
                scales[spec.name] = _scale_of(tensor.detach())
        aliases = dict(prepared.layout.aliases)
        # Tied tensors stay tied: one tensor under two names.
        packed = {
            spec.name: (tensor.detach() / scales[spec.name]).to(_WIRE)
            if spec.name in scales
            else tensor
            for spec, tensor in zip(prepared.layout.specs, prepared.tensors, strict=True)
        }
        packed |= {name: packed[owner] for name, owner in aliases.items()}
        packed |= {_SCALE + name: scale for name, scale in scales.items()}
        prepared.rename(packed)
        return prepared

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update) -> Generator[None, bool, bool]:
        """Multiply by the scales, and remove them."""
        arrived = dict(update.items())
        scales = {n.removeprefix(_SCALE): t for n, t in arrived.items() if n.startswith(_SCALE)}
        if scales:
            restored = {
                name: (arrived[name].to(scale.dtype) * scale) for name, scale in scales.items()
            }
            for name, owner in update.layout.aliases:
                restored[name] = restored.get(owner, arrived[owner])
            named = {n: restored.get(n, t) for n, t in arrived.items() if not n.startswith(_SCALE)}
            update.rename(named)
        return (yield)


def _shrinks(tensor: Tensor) -> bool:
    wide = tensor.is_floating_point() and tensor.element_size() > 1
    return wide and tensor.dim() > 1 and tensor.numel() > 0


def _scale_of(tensor: Tensor) -> Tensor:
    rows = tensor.flatten(1).abs().amax(1)
    scale = torch.where(rows > 0, rows / _LARGEST, torch.ones_like(rows))
    return scale.reshape(-1, *(1,) * (tensor.dim() - 1))
