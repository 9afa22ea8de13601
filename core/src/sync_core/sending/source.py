"""What a sender sends: finds the weights, and holds them to the layout that was agreed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sync_core.errors import ModelError
from sync_core.models.binding import Binding
from sync_core.models.extract import Strategy, named_tensors
from sync_core.models.match import conform
from sync_core.models.multi_model import look_up, refers, same
from sync_core.models.shared_model_check import check_same
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Update


class Source:
    """Where a sender's weights come from.

    Args:
        context: the object in which string references are looked up.
        strategy: how a module is read.
        partial: whether weights given by hand may lack some of the model's tensors.
        moves_nothing: how to name the scheme in a message, if workers act with the model itself:
            weights given by hand must be those that it has.
    """

    def __init__(
        self,
        context: Any,
        strategy: Strategy,
        *,
        partial: bool,
        moves_nothing: str | None = None,
    ) -> None:
        self.model: Any = None
        self.layout: Layout | None = None
        self._context = context
        self._strategy = strategy
        self._partial = partial
        self._moves_nothing = moves_nothing
        self._own: Binding | None = None
        self._given: Binding | None = None

    def read(self, weights: Any = None) -> Update:
        """The weights given, or else the model's, as an update that aliases them.

        The first weights read fix the layout; later ones must fit it.

        Raises:
            ModelError: there are none, or they cannot travel, or have to and the scheme moves
                nothing.
            ModelPathError: a string reference leads nowhere.
            LayoutMismatchError: a name, dtype or shape differs from the layout.
        """
        update = self._read(self.model if weights is None else weights)
        if self.layout is None:
            if not update.layout.specs:
                raise ModelError("the weights hold no tensors, so there is nothing to send")
            self.layout = update.layout
        if update.layout is not self.layout:
            if update.layout == self.layout:
                update = Update(self.layout, update.source)
            else:
                update = conform(dict(update.items()), self.layout, partial=self._partial)
        by_hand = weights is not None and weights is not self.model
        if by_hand and self._moves_nothing is not None and self.model is not None:
            check_same(
                update.items(),
                dict(self._read(self.model).items()),
                f"{self._moves_nothing} moves nothing: workers act with that model itself; load "
                "the weights into it (model.load_state_dict(…)) and send nothing else, or use "
                "scheme='thread'",
            )
        return update

    def own_tensors(self) -> Mapping[str, Tensor]:
        """The registered model's tensors by name; none without a registered model."""
        return {} if self.model is None else dict(self._read(self.model).items())

    def own_model(self) -> Any:
        """The sender's model, or what a reference leads to; None if there is none."""
        return None if self.model is None else look_up(self.model, self._context)

    def _read(self, weights: Any) -> Update:
        own = weights is self.model
        if weights is None:
            raise ModelError("nothing to send: give weights, or register a model")
        if refers(weights):
            if self._context is None:
                raise ModelError(f"{weights!r} is looked up in a context: Sender(…, context=…)")
            weights = look_up(weights, self._context)
        if own:
            self._own = _bound(self._own, weights, self._strategy)
            return self._own.read()
        if _holds_modules(weights):
            self._given = _bound(self._given, weights, self._strategy)
            return self._given.read()
        return Update.of(named_tensors(weights, self._strategy))


def _holds_modules(weights: Any) -> bool:
    if isinstance(weights, nn.Module):
        return True
    return isinstance(weights, Mapping) and any(
        isinstance(value, nn.Module) for value in weights.values()
    )


def _bound(binding: Binding | None, model: Any, strategy: Strategy) -> Binding:
    if binding is not None and same(binding.model, model):
        return binding
    return Binding(model, strategy)
