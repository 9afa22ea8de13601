"""The base of a partial update: the version that a worker must have to use it.

It travels in a separate tensor; 0 stands for an update of all tensors. A worker that holds less
than the base refuses the update, and gets all tensors with the next one: see
`sync_core.sending.partial`.

Where a layer leaves tensors out, their digest travels after the base: see `sync_core.left_out`.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache

import numpy as np
import torch

from sync_core.errors import PayloadError
from sync_core.hooks import hookimpl
from sync_core.weights.layout import ALIGNMENT, BASE, Layout, TensorSpec
from sync_core.weights.payload import Payload, Update

# The base, and the 80 bytes of a digest.
_WORDS = 11


class BaseLayer:
    """The layer of partial updates next to the wire: adds the base, and takes it out again."""

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        """Add the base, and the digest of what is left out."""
        update = yield
        words = np.frombuffer(update.left_out, dtype=np.int64).tolist()
        base = torch.tensor([update.base, *words], dtype=torch.int64)
        update.become(_with_base(update.layout, len(base)), (*update.tensors, base))
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update) -> Generator[None, bool, bool]:
        """Take the base and the digest out."""
        layout = _without_base(update.layout)
        if layout is not None:
            *tensors, base = update.tensors
            words = base.cpu().numpy()
            update.base, update.left_out = int(words[0]), words[1:].tobytes()
            update.become(layout, tensors)
        return (yield)


def check_base(payload: Payload, held: int) -> None:
    """Raise `PayloadError` unless a payload brings all that a model of version ``held`` lacks."""
    position = payload.layout.index.get(BASE)
    if position is None:
        return
    spec = payload.layout.specs[position]
    if (spec.dtype, spec.shape) not in ((torch.int64, (1,)), (torch.int64, (_WORDS,))):
        raise PayloadError(f"the base of a payload must be int64[1] or [{_WORDS}], got {spec}")
    base = int(payload.tensors[position][0].item())
    if base > held:
        raise PayloadError(
            f"version {payload.version} brings only what changed after version {base}, and the "
            f"model has version {held}; the next send brings everything"
        )


@lru_cache(maxsize=64)
def _with_base(layout: Layout, words: int) -> Layout:
    end = layout.body_nbytes
    spec = TensorSpec(BASE, torch.int64, (words,), end + -end % ALIGNMENT)
    return Layout((*layout.specs, spec), layout.aliases)


@lru_cache(maxsize=64)
def _without_base(layout: Layout) -> Layout | None:
    if not layout.specs or layout.specs[-1].name != BASE:
        return None
    return Layout(layout.specs[:-1], layout.aliases)
