"""Partial updates: what each worker lacks is added to what is sent.

With ``Sender(partial=True)`` the sender knows for each tensor the version in which it last
changed, and for each worker the version that it holds completely. An update brings every tensor
that changed after the oldest of these versions, which travels with it:
`sync_core.increments.partial`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from sync_core.errors import ModelError
from sync_core.sending.pipeline import Source
from sync_core.sending.trainable import TrainableOnly
from sync_core.weights.layout import Layout, place_of
from sync_core.weights.payload import Update


class PartialUpdates:
    """Completes partial updates for the workers that are sent them.

    Args:
        source: the sender's source of weights.
        only: selects from the sender's model what has to travel; None for all of it.
    """

    def __init__(self, source: Source, only: TrainableOnly | None = None) -> None:
        self._source = source
        self._only = only
        self._versions = TensorVersions()

    def check(self, update: Update) -> None:
        """Raise `ModelError` if the model has changed where it is not sent again."""
        if self._only is not None:
            self._only.check(update, self._source.own_model())

    def complete(self, given: Any, update: Update, version: int, held: Iterable[int]) -> Update:
        """Return an update with all that workers lack.

        Args:
            given: the weights as they were given to `send`; None for the sender's model.
            update: what was read from them.
            version: the version that will carry them.
            held: the version that each of the workers holds completely.
        """
        layout = self._source.layout
        if layout is None:
            return update
        if self._only is not None:
            if given is None:
                update = self._only.select(update, self._source.own_model())
            else:
                self._only.forget()
        if given is None and update.layout is layout:
            self._versions.record(None, layout, {}, version)
            return update
        own = self._source.own_tensors()
        self._versions.record(update, layout, own, version)
        if update.layout is layout:
            return update
        return self._versions.since(min(held, default=0), layout, own)


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
