"""The source of a sender's weights: a model, or what a send is given in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sync_core.errors import ModelError
from sync_core.models.binding import Binding
from sync_core.models.extract import ComputedWeights, Strategy, named_tensors
from sync_core.models.finder import KnownLayout, check_memory, travelling
from sync_core.models.lookup import look_up, modules_in, refers, same
from sync_core.models.match import conform
from sync_core.models.modules import check_forward_hooks
from sync_core.models.registered import check_registered
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Update
from sync_core.weights.streamed import TensorStream


class Source:
    """The source of a sender's weights.

    Args:
        context: the object in which string references are looked up.
        strategy: how a module is read.
        partial: whether weights given by hand may lack some of the model's tensors.
        adapt: returns what is read in place of weights: the same object, or tensors by name.
        allowed: what modules may train without registering it; see `check_registered`. None for
            all, where workers act with the same objects.
        hooked: whether something completes the model before it is read.
    """

    def __init__(
        self,
        context: Any,
        strategy: Strategy,
        *,
        partial: bool,
        adapt: Callable[[Any], Any] | None = None,
        allowed: Sequence[Any] | None = None,
        hooked: bool = False,
    ) -> None:
        self.model: Any = None
        #: The object from which weights were read last; None for tensors given by hand.
        self.found: Any = None
        #: Whether the weights read last were given in place of the model's.
        self.by_hand = False
        self._context = context
        self._strategy = strategy
        self._partial = partial
        self._adapt = adapt
        self._own: Binding | None = None
        self._given: Binding | None = None
        self._known: KnownLayout | None = None
        self._allowed = allowed
        self._hooked = hooked
        # Already checked for tensors that are not registered: the model, and the last weights.
        self._registered: dict[bool, Any] = {}

    def read(self, weights: Any, agreed: Layout | None) -> Update:
        """The weights given, or else the model's, as an update that aliases them.

        Args:
            weights: what is read; None for the model.
            agreed: the layout that they must fit; None before one was agreed.

        Raises:
            ModelError: there are none, or they cannot travel, or have to and the scheme moves
                nothing.
            ModelPathError: a string reference leads nowhere.
            LayoutMismatchError: a name, dtype or shape differs from the layout.
        """
        self.by_hand = not (weights is None or self.model is None or weights is self.model)
        own = self._own
        if weights is None and own is not None and own.model is self.model:
            # The same object as before: neither a reference, nor several models.
            self.found = self.model
            update = own.read()
        else:
            update = self._read(self.model if weights is None else weights)
        if agreed is None:
            if not update.layout.specs:
                raise ModelError("the weights hold no tensors, so there is nothing to send")
            # As in a state_dict under DeepSpeed ZeRO-3. A shard may be empty in other shapes.
            shapes = [spec.shape for spec in update.layout.specs]
            if len(shapes) > 1 and set(shapes) == {(0,)}:
                raise ModelError(
                    "the weights hold no elements, so there is nothing to send; gather a model "
                    "that is partitioned: with deepspeed.zero.GatheredParameters("
                    "list(model.parameters())): sender.send()"
                )
        elif update.layout is not agreed:
            if update.layout == agreed:
                update = Update(agreed, update.source)
            else:
                is_own = weights is None or weights is self.model
                # Workers do not hold a tensor that the model has lost as the model does.
                partial = self._partial and not (is_own and self.found is self.model)
                update = conform(dict(update.items()), agreed, partial=partial, own=is_own)
        return update

    def own_tensors(self) -> Mapping[str, Tensor]:
        """The registered model's tensors by name; none without a registered model."""
        return {} if self.model is None else dict(self._read(self.model).items())

    def _read(self, weights: Any) -> Update:
        own = weights is self.model
        if weights is None:
            raise ModelError("nothing to send: give weights, or register a model")
        if refers(weights):
            if self._context is None:
                raise ModelError(f"{weights!r} is looked up in a context: Sender(…, context=…)")
            weights = look_up(weights, self._context)
        self.found = weights if own or _holds_modules(weights) else None
        if isinstance(weights, ComputedWeights):
            self.found = weights.model
        update = self._read_found(weights, own=own)
        if not (self._allowed is None or same(self.found, self._registered.get(own))):
            check_registered(weights, self._strategy, self._allowed)
            if not self._hooked:
                for _, module in modules_in(self.found):
                    check_forward_hooks(module)
            self._registered[own] = self.found
        return update

    def _read_found(self, weights: Any, *, own: bool) -> Update:
        if isinstance(weights, ComputedWeights):
            return self._computed(weights.read(self._strategy))
        if self._adapt is not None and (adapted := self._adapt(weights)) is not weights:
            return self._lay_out(adapted)
        if own:
            self._own = _bound(self._own, weights, self._strategy)
            return self._own.read()
        if self.found is not None:
            self._given = _bound(self._given, weights, self._strategy)
            return self._given.read()
        return self._lay_out(named_tensors(weights, self._strategy))

    def _computed(self, made: Mapping[str, Tensor] | TensorStream) -> Update:
        if not isinstance(made, TensorStream):
            named = dict(made)
            return self._lay_out(named if self._adapt is None else self._adapt(named))
        update = Update(made.layout, made)
        if self._adapt is None:
            return update
        # By name, so that a scheme which takes all of them reads the stream.
        by_name = NamedStream(update)
        adapted = self._adapt(by_name)
        return update if adapted is by_name else self._lay_out(dict(adapted))

    def _lay_out(self, named: dict[str, Tensor]) -> Update:
        if self._known is None or not self._known.fits(named):
            self._known = KnownLayout(named)
        check_memory(named)
        return Update(self._known.layout, travelling(self._known.layout, named))


class NamedStream(Mapping[str, Tensor]):
    """The tensors of a stream by name; the first that is read has all of them made."""

    def __init__(self, update: Update) -> None:
        self._update = update

    def __getitem__(self, name: str) -> Tensor:
        return self._update.tensors[self._update.layout.index[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._update.layout.names)

    def __len__(self) -> int:
        return len(self._update.layout.names)


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
