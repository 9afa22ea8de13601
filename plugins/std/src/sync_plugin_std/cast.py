"""The layers ``bf16`` and ``fp16``: floating-point weights travel in half the bytes."""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import ClassVar

import torch

from sync_core import Layout, Update, hookimpl


class _Cast:
    """Casts what is wider; workers cast what arrives to the dtypes of their models."""

    capabilities = frozenset({"cast"})
    _wire_dtype: ClassVar[torch.dtype]

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        """Cast what is floating-point and wider than the wire's dtype."""
        prepared = yield
        wider = _wider(prepared.layout, self._wire_dtype)
        if wider:
            tensors = list(prepared.tensors)
            for position in wider:
                tensors[position] = tensors[position].detach().to(self._wire_dtype)
            prepared.replace(tensors)
        return prepared


class BFloat16(_Cast):
    """Weights travel as bfloat16: the range of float32, with 8 bits of precision."""

    _wire_dtype = torch.bfloat16


class Float16(_Cast):
    """Weights travel as float16: 11 bits of precision; magnitudes over 65504 become infinite."""

    _wire_dtype = torch.float16


@lru_cache(maxsize=64)
def _wider(layout: Layout, wire: torch.dtype) -> tuple[int, ...]:
    """The positions of the tensors that are cast."""
    return tuple(
        position
        for position, spec in enumerate(layout.specs)
        if spec.dtype.is_floating_point and spec.dtype.itemsize > wire.itemsize
    )
