"""Partial updates: what has to travel of a model, and what each worker lacks besides.

With ``Sender(partial=True)`` the sender knows for each tensor the version in which it last
changed, and for each worker the version that it holds completely. An update brings every tensor
that changed after the oldest of these versions, which travels with it:
`sync_core.weights.extras`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from torch import Tensor, nn

from sync_core.errors import ModelError, OptionError
from sync_core.models.extract import Strategy, named_tensors
from sync_core.models.sampling import TensorState, states, total
from sync_core.sending.pipeline import Source
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


class TrainableOnly:
    """Selects what a version has to bring: all but frozen parameters that were sent before.

    A parameter that is frozen later is sent once more, and one that is trained again with every
    version from then on.

    Args:
        strategy: how the model is read.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        >>> only = TrainableOnly("tensordict")
        >>> update = Update.of(dict(model.named_parameters()))
        >>> [len(only.select(update, model).layout.specs) for _ in range(2)]
        [4, 2]
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._sent: dict[str, TensorState] = {}

    @classmethod
    def of(cls, only: object, strategy: Strategy) -> Self | None:
        """Return the selection that the argument ``only`` of `Sender` asks for; None for None.

        Raises:
            OptionError: it is something else.
        """
        if only is None:
            return None
        if only != "trainable":
            raise OptionError(f"only must be 'trainable' or None, got {only!r}")
        return cls(strategy)

    def select(self, update: Update, model: Any) -> Update:
        """Return the part of an update of the whole model that has to travel.

        Raises:
            ModelError: a frozen parameter has changed since it was sent, as a sample shows.
        """
        layout, tensors = update.layout, update.tensors
        frozen = self._frozen(update, model)
        found = dict(zip(frozen, states(list(frozen.values())), strict=True))
        for name, sent in self._sent.items():
            if name in frozen and found[name] != sent:
                raise _changed(name)
        names = [spec.name for spec in layout.specs]
        kept = tuple(
            i for i, name in enumerate(names) if name not in frozen or name not in self._sent
        )
        for name, state in found.items():
            if name not in self._sent:
                state.settle()
        self._sent = {name: self._sent.get(name, state) for name, state in found.items()}
        return Update(layout.subset(kept), [tensors[i] for i in kept])

    def forget(self) -> None:
        """Take no parameter for sent: other weights than the model's are."""
        self._sent = {}

    def check(self, update: Update, model: Any) -> None:
        """Raise `ModelError` where a frozen parameter has changed since it was sent at all."""
        for name, tensor in self._frozen(update, model).items():
            if name in self._sent and total(tensor) != self._sent[name].total:
                raise _changed(name)

    def _frozen(self, update: Update, model: Any) -> Mapping[str, Tensor]:
        """The tensors of an update that are parameters under all their names, and not trained."""
        index, specs = update.layout.index, update.layout.specs
        trained = {
            index[name]
            for name, tensor in named_tensors(model, self._strategy).items()
            if not isinstance(tensor, nn.Parameter) or tensor.requires_grad
        }
        return {
            spec.name: tensor
            for i, (spec, tensor) in enumerate(zip(specs, update.tensors, strict=True))
            if i not in trained
        }


def _changed(name: str) -> ModelError:
    return ModelError(
        f"{name!r} does not require a gradient, and has changed since it was sent, which "
        "only='trainable' would not send; type sender.send(model.state_dict()) to send all, or "
        "leave out only="
    )
