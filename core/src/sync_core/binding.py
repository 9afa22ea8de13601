"""A model bound to its layout: its tensors are found once, then read and written in one go."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from sync_core import commit
from sync_core.compare import check_match
from sync_core.errors import ModelError
from sync_core.extra_state import is_extra_state
from sync_core.extract import Strategy, check_strategy
from sync_core.finder import finder
from sync_core.flat import Flat
from sync_core.layout import Layout
from sync_core.update import Update

_kind = operator.attrgetter("dtype", "shape")


class Binding:
    """A model whose weights are read into updates and written from them.

    What was found in the model is kept while the model stays as it is; finding out that it did
    costs no Python code per tensor.

    Args:
        model: an `nn.Module`, a TensorDict or a state_dict, whose tensors are read and written
            in place.
        strategy: ``"tensordict"`` or ``"state_dict"``; see `sync_core.extract.Strategy`.

    Raises:
        ModelError: the model has no tensors, or one that cannot travel.
    """

    def __init__(self, model: Any, strategy: Strategy = "tensordict") -> None:
        check_strategy(strategy)
        self.model = model
        self._strategy = strategy
        self._find = finder(model, strategy)
        self._named: dict[str, Tensor] = {}
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._layout = Layout(())
        self._writable = False
        self._extra_state = False
        self._flat: Flat | None = None
        self._tried_flat = False
        if not self.layout.specs:
            raise ModelError(
                f"{type(model).__name__} has no tensors, so there is nothing to synchronise"
            )

    @property
    def layout(self) -> Layout:
        """The layout of the model as it is now."""
        named = self._find()
        if not self._fits_layout(named):
            self._layout = Layout.of(named)
            self._kinds = list(map(_kind, named.values()))
            self._writable = False
            self._extra_state = isinstance(self.model, nn.Module) and any(
                is_extra_state(name) for name in named
            )
        self._named = named
        return self._layout

    def read(self) -> Update:
        """The model's weights as an update that aliases them."""
        layout = self.layout
        return Update(layout, self._travelling())

    def write(self, update: Update, *, partial: bool = False, zero_copy: bool = False) -> None:
        """Load an update, all of it or nothing.

        Args:
            update: the weights.
            partial: whether the update may lack some of the model's tensors.
            zero_copy: whether parameters become the update's tensors. Buffers are copied still,
                since modules write to them (running statistics, for example).

        Raises:
            LayoutMismatchError: a name, dtype or shape differs; nothing was written.
            ModelError: a tensor of the model cannot be written to; nothing was written.
        """
        if self._write_flat(update):
            return
        mine, theirs = self.layout, update.layout
        if mine != theirs:
            check_match(theirs, mine, partial=partial)
        if not self._writable:
            commit.check_writable(self._named)
            self._writable = True
        if self._extra_state:
            with commit.extra_state_set(self.model, dict(update.items())):
                self._write_tensors(update, zero_copy=zero_copy)
        else:
            self._write_tensors(update, zero_copy=zero_copy)

    def _travelling(self) -> list[Tensor]:
        if not self._layout.aliases:
            return list(self._named.values())
        return [self._named[spec.name] for spec in self._layout.specs]

    def _fits_layout(self, named: dict[str, Tensor]) -> bool:
        known = self._named
        if not known or (named is not known and list(named) != list(known)):
            return False
        # One at a time: thousands of tuples alive at once would set off the garbage collector.
        if not all(map(operator.eq, map(_kind, named.values()), self._kinds)):
            return False
        return all(
            named[name].data_ptr() == named[owner].data_ptr()
            for name, owner in self._layout.aliases
        )

    def _write_tensors(self, update: Update, *, zero_copy: bool) -> None:
        if self._strategy == "state_dict" and isinstance(self.model, nn.Module):
            commit.load_state_dict(self.model, dict(update.items()))
        elif zero_copy:
            self._write_zero_copy(update)
        elif self._layout == update.layout:
            self._write_whole(update)
        else:
            commit.copy(*self._matched(update))

    def _write_flat(self, update: Update) -> bool:
        """Load an update in one copy, if the model still is as it was when it was gathered."""
        if self._flat is None or update.body is None or update.layout != self._layout:
            return False
        return self._flat.write(self._find(), update.body)

    def _write_whole(self, update: Update) -> None:
        commit.copy(self._travelling(), update.tensors)
        if update.body is not None and not self._tried_flat and isinstance(self.model, nn.Module):
            self._tried_flat = True
            if not self._extra_state:
                self._flat = Flat.gather(self._layout, self._named)

    def _matched(self, update: Update) -> tuple[list[Tensor], list[Tensor]]:
        index = update.layout.index
        names = [name for name in self._named if name in index]
        return [self._named[n] for n in names], [update.tensors[index[n]] for n in names]

    def _write_zero_copy(self, update: Update) -> None:
        targets, sources = self._matched(update)
        pairs = list(zip(targets, sources, strict=True))
        if any(target.device != source.device for target, source in pairs):
            raise ModelError(
                f"zero_copy needs the model on {sources[0].device}, where the weights arrive; "
                "use zero_copy=False for a model elsewhere"
            )
        by_pointer = [
            not isinstance(self.model, nn.Module) or isinstance(target, nn.Parameter)
            for target in targets
        ]
        copied = [pair for pair, pointed in zip(pairs, by_pointer, strict=True) if not pointed]
        commit.copy([target for target, _ in copied], [source for _, source in copied])
        for (target, source), pointed in zip(pairs, by_pointer, strict=True):
            if pointed:
                target.data = source
