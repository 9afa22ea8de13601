"""The layers ``bf16`` and ``fp16``: floating-point weights travel in half the bytes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import torch

from sync_core import ApplyContext, SendContext, Update, hookimpl


class _Cast:
    _wire_dtype: ClassVar[torch.dtype]

    @hookimpl(wrapper=True)
    def prepare_weights(
        self, update: Update, context: SendContext
    ) -> Generator[None, Update, Update]:
        """Cast what is floating-point and wider than the wire's dtype."""
        del update, context
        prepared = yield
        wire = self._wire_dtype
        prepared.replace(
            [
                tensor.detach().to(wire)
                if tensor.is_floating_point() and tensor.element_size() > wire.itemsize
                else tensor
                for tensor in prepared.tensors
            ]
        )
        return prepared

    @hookimpl(wrapper=True)
    def apply_weights(
        self, update: Update, model: Any, context: ApplyContext
    ) -> Generator[None, bool, bool]:
        """Cast back to the dtypes that the sender's model has."""
        del model
        sent = context.layout
        if sent is not None:
            update.replace(
                [
                    tensor.to(sent.specs[sent.index[spec.name]].dtype)
                    if tensor.dtype == self._wire_dtype and spec.name in sent.index
                    else tensor
                    for spec, tensor in zip(update.layout.specs, update.tensors, strict=True)
                ]
            )
        return (yield)


class BFloat16(_Cast):
    """Weights travel as bfloat16: the range of float32, with 8 bits of precision."""

    _wire_dtype = torch.bfloat16


class Float16(_Cast):
    """Weights travel as float16: 11 bits of precision; magnitudes over 65504 become infinite."""

    _wire_dtype = torch.float16
