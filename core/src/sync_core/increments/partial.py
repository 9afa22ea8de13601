"""Partial updates: what each worker lacks, and the version on which an update builds.

With ``Sender(partial=True)`` the sender knows for each tensor the version in which it last
changed, and for each worker the version that it holds completely. An update brings every tensor
that changed after the oldest of these versions. That version, the base, travels in a tensor of
its own; 0 stands for an update of all tensors. A worker that holds less than the base refuses the
update, and gets all tensors with the next one.

Where a layer leaves tensors out, their digest travels after the base: see `sync_core.left_out`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sync_core.errors import ModelError, PayloadError
from sync_core.hooks import hookimpl
from sync_core.weights.layout import ALIGNMENT, BASE, Layout, TensorSpec, place_of
from sync_core.weights.payload import Payload, Update

# The base, and the 32 bytes of a digest.
_WORDS = 5


class TensorVersions:
    """The version in which each tensor last changed, and the values that are not the model's.

    Values are read from the registered model when they are sent. Weights given by hand that do not
    alias that model are copied, since a worker may need them later.
    """

    def __init__(self) -> None:
        self._changed: list[int] = []
        self._copies: dict[int, Tensor] = {}

    def record(
        self, given: Update | None, layout: Layout, own: Mapping[str, Tensor], version: int
    ) -> None:
        """Note that weights were given for a version.

        Args:
            given: the weights; None for all of the registered model's.
            layout: the layout of the whole model.
            own: the registered model's tensors; empty if there is none.
            version: the version that will carry them.
        """
        if given is None or not self._changed:
            self._changed = [version] * len(layout.specs)
        if given is None:
            self._copies.clear()
            return
        for name, tensor in given.items():
            position = layout.index[name]
            self._changed[position] = version
            if name in own and place_of(own[name]) == place_of(tensor):
                self._copies.pop(position, None)
            else:
                self._copies[position] = tensor.detach().to("cpu", copy=True)

    def since(self, base: int, layout: Layout, own: Mapping[str, Tensor]) -> Update:
        """Return the tensors that changed after version ``base``.

        Raises:
            ModelError: one of them is neither in the registered model nor was given by hand.
        """
        positions = [i for i, version in enumerate(self._changed) if version > base]
        whole = len(positions) == len(layout.specs)
        tensors = []
        for position in positions:
            name = layout.specs[position].name
            tensor = self._copies.get(position, own.get(name))
            if tensor is None:
                raise ModelError(
                    f"a worker lacks {name!r}, which the sender does not have; send the whole model"
                )
            tensors.append(tensor)
        subset = layout.subset(tuple(positions)).with_tensors(tensors)
        return Update(subset, tensors, 0 if whole else base)


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
