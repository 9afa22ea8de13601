"""Reads a model's weights into updates, and writes them from updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from sync_core.errors import LayoutMismatchError, ModelError
from sync_core.models import commit
from sync_core.models.contiguous import ContiguousTensors, check_allocated
from sync_core.models.extract import Strategy, check_strategy, held_tensors, not_saved
from sync_core.models.finder import KnownLayout, check_memory, tensor_finder, travelling
from sync_core.models.lookup import modules_in
from sync_core.models.match import cast_within, check_match, narrows
from sync_core.models.memory import (
    ParameterViews,
    Places,
    WriteGuard,
    check_held,
    check_writable,
)
from sync_core.models.modules import is_extra_state, is_json
from sync_core.weights.copying import copy
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Update

# Below this size in bytes, one copy takes as long as one for each tensor.
_WORTHWHILE = 1 << 20


class Binding:
    """A model, or several, whose weights are read into updates and written from them.

    The tensors found in the model are kept while the model stays as it is; checking that it did
    costs no Python code per tensor of a module. A write is all of the models or none. Parameters
    that view an update's memory are watched: the write after one in place by someone else raises.

    Args:
        model: an `nn.Module`, a TensorDict or a state_dict, whose tensors are read and written
            in place; or a mapping from names to such models.
        strategy: ``"tensordict"`` or ``"state_dict"``; see `sync_core.models.extract.Strategy`.
        consolidate: whether the first write of a large update may move the model's tensors into
            one block; see `consolidate`.

    Raises:
        ModelError: the model has no tensors, or one that cannot travel.
    """

    def __init__(
        self, model: Any, strategy: Strategy = "tensordict", *, consolidate: bool = False
    ) -> None:
        check_strategy(strategy)
        self.model = model
        self._strategy = strategy
        self._find = tensor_finder(model, strategy)
        self._named: dict[str, Tensor] = {}
        # Those of them that travel, in the order of the layout.
        self._tensors: list[Tensor] = []
        self._known = KnownLayout({})
        self._modules: commit.Modules = ()
        # Whether they load weights by their own `load_state_dict`.
        self._loads_state_dicts = False
        self._places = Places(())
        # The layouts of the last update and of the model, which were found to fit.
        self._matching: tuple[Layout, Layout] | None = None
        # The positions of tensors of the update whose dtypes end beyond the model's.
        self._narrowed: list[tuple[int, torch.dtype]] = []
        self._extra_state = False
        self._flat: ContiguousTensors | None = None
        self._may_consolidate = consolidate
        self._pointing: ParameterViews | None = None
        self._lent: WriteGuard | None = None
        #: Whether the last write raised between two tensors, so that the model has parts of both.
        self.torn = False
        if not self.layout.specs:
            raise ModelError(
                f"{type(model).__name__} has no tensors, so there is nothing to synchronise"
            )

    @property
    def layout(self) -> Layout:
        """The layout of the model as it is now."""
        named = self._find()
        if named is self._named:
            if not self._known.still_fits(named, self._tensors):
                self._lay_out(named)
        else:
            self._modules = modules_in(self.model)
            self._loads_state_dicts = self._strategy == "state_dict" and bool(self._modules)
            if not self._known.fits(named):
                self._lay_out(named)
            self._named = named
            self._tensors = travelling(self._known.layout, named)
        return self._known.layout

    def read(self) -> Update:
        """The model's weights as an update that aliases them.

        Raises:
            ModelError: a tensor's memory was taken away.
        """
        layout = self.layout
        if ContiguousTensors.exist and (flat := self._current_flat()):
            return Update(layout, flat.block)
        if not all(map(Tensor.data_ptr, self._tensors)):
            check_memory(self._named)
        return Update(layout, self._tensors)

    def consolidate(self) -> None:
        """Move the model's tensors into one block, laid out like a payload.

        Raises:
            ModelError: that cannot be done safely; nothing was moved.
        """
        layout = self.layout
        self._check_movable()
        if not self._current_flat():
            self._flat = ContiguousTensors.gather(layout, self._named)

    def _check_movable(self) -> None:
        prefixes = self._module_prefixes()
        for name in self._named:
            if is_extra_state(name):
                raise ModelError(f"{name!r} is recomputed whenever it is read; it has no memory")
            if not name.startswith(prefixes):
                raise ModelError(f"{name!r} is not a module's; only modules are moved")
        check_allocated(self._named)

    def write(
        self,
        update: Update,
        *,
        partial: bool = False,
        zero_copy: bool = False,
        cast: bool = False,
        version: int = 0,
    ) -> None:
        """Load an update, all of it or nothing.

        Args:
            update: the weights.
            partial: whether the update may lack some of the model's tensors.
            zero_copy: whether parameters become the update's tensors. Buffers are copied still,
                since modules write to them (running statistics, for example).
            cast: whether a floating-point tensor may have another floating-point dtype than the
                model's, to which it is cast then.
            version: the version of the weights; 0 for weights whose memory is not shared, so
                that zero-copy parameters may be written to.

        Raises:
            LayoutMismatchError: a name, dtype or shape differs; nothing was written.
            ModelError: the model's dtype cannot hold a value; a tensor of the model cannot be
                written to, or was written to in place
                since zero-copy pointed it at the version before; nothing was written. The latter
                is said once: the next write goes ahead.
        """
        if self._lent is not None:
            self._check_lent(self._lent)
        mine, theirs = self.layout, update.layout
        equal = mine == theirs
        plain = not zero_copy and self._strategy == "tensordict"
        if plain and equal and ContiguousTensors.exist and self._write_flat(update):
            return
        if not equal:
            self._check_fits(update, partial=partial, cast=cast)
        if cast and (zero_copy or self._extra_state):
            update, theirs = self._cast(update)
        if zero_copy and not self._loads_state_dicts:
            self._prepare_pointing(theirs, partial=partial)
        else:
            self._check_places(theirs, partial=partial, cast=cast)
        if self._extra_state:
            self._check_extra_state(theirs)
            with commit.extra_state_set(self._modules, dict(update.items())):
                self._write_tensors(update, zero_copy=zero_copy, version=version)
        else:
            self._write_tensors(update, zero_copy=zero_copy, version=version)

    def _check_fits(self, update: Update, *, partial: bool, cast: bool) -> None:
        """Raise unless an update of another layout fits the model, and so does each value."""
        mine, theirs = self._known.layout, update.layout
        if (theirs, mine) != self._matching:
            check_match(
                theirs, mine, partial=partial, cast=cast, not_saved=lambda: not_saved(self.model)
            )
            self._matching = theirs, mine
            dtypes = [mine.specs[mine.index[spec.name]].dtype for spec in theirs.specs]
            self._narrowed = [
                (position, dtype)
                for position, dtype in enumerate(dtypes)
                if dtype.is_floating_point and narrows(theirs.specs[position].dtype, dtype)
            ]
        for position, dtype in self._narrowed:
            cast_within(theirs.specs[position].name, update.tensors[position], dtype)

    def _check_extra_state(self, layout: Layout) -> None:
        """Raise for extra state that only a module can take, if no module has it here."""
        prefixes, mine = self._module_prefixes(), self._known.layout
        for name in filter(is_extra_state, layout.names):
            if name.startswith(prefixes):
                continue
            if is_json(name):
                raise ModelError(
                    f"{name!r} can be written into a module only, since it is extra state that "
                    "is not made of tensors alone; give the module instead of its state_dict"
                )
            shapes = [
                list(one.specs[one.index[name]].shape)
                for one in (layout, mine)
                if name in one.index
            ]
            if shapes[0] != shapes[-1]:
                raise LayoutMismatchError(
                    f"{name!r} is extra state of the shape {shapes[0]}, and has the shape "
                    f"{shapes[1]} in the model; only a module can take extra state of another "
                    "shape; give the module instead of its state_dict"
                )

    def _check_lent(self, lent: WriteGuard) -> None:
        self._lent = None
        lent.check()
        self._lent = lent

    def _lay_out(self, named: dict[str, Tensor]) -> None:
        self._known = KnownLayout(named)
        self._tensors = travelling(self._known.layout, named)
        self._places = Places(())
        self._extra_state = any(map(is_extra_state, named))

    def _check_places(self, layout: Layout, *, partial: bool, cast: bool) -> None:
        """Raise unless every tensor of an update of this layout can be written where it belongs."""
        named = self._named
        if self._loads_state_dicts:
            # A state_dict may show other tensors than those that are written.
            named = held_tensors(self.model)
        if self._extra_state:
            named = {name: tensor for name, tensor in named.items() if not is_extra_state(name)}
        if not self._places.hold(named.values()):
            # Tensors that lie elsewhere now may have been tied.
            self._lay_out(self._named)
            check_match(layout, self._known.layout, partial=partial, cast=cast)
            check_memory(self._named)
            self._check_writable(named)
            self._places = Places(named.values())

    def _prepare_pointing(self, layout: Layout, *, partial: bool) -> None:
        """Find what is pointed and what is copied into; see `_check_places`."""
        check_memory(self._named)
        if self._pointing is None or not self._pointing.is_for(self._named, layout):
            # Tensors of another model than before may have been tied.
            self._lay_out(self._named)
            check_match(layout, self._known.layout, partial=partial)
            self._check_writable(self._named)
            self._pointing = ParameterViews(self._named, layout, self._module_prefixes())

    def _check_writable(self, named: Mapping[str, Tensor]) -> None:
        check_writable(named)
        check_held(named, held_tensors(self.model))

    def _write_tensors(self, update: Update, *, zero_copy: bool, version: int) -> None:
        if self._loads_state_dicts:
            self._load_state_dicts(update)
        elif zero_copy and self._pointing is not None:
            self._overwrite(self._pointing.apply, update.tensors)
            self._lent = self._pointing.guard(version) if version else None
        elif self._known.layout == update.layout or (
            not self._extra_state and _same_names(self._known.layout, update.layout)
        ):
            self._write_whole(update)
        else:
            self._overwrite(_copy, [(mine, new) for _, mine, new in self._matched(update)])

    def _overwrite(self, write: Callable[..., object], *args: Any) -> None:
        """Call what writes into the tensors; the model is torn if that raises."""
        self.torn = True
        try:
            write(*args)
        except ModelError:  # raised before anything is written
            self.torn = False
            raise
        self.torn = False

    def _load_state_dicts(self, update: Update) -> None:
        commit.load_state_dicts(self._modules, dict(update.items()))
        matched, prefixes = self._matched(update), self._module_prefixes()
        rest = [(mine, new) for name, mine, new in matched if not name.startswith(prefixes)]
        self._overwrite(_copy, rest)

    def _write_flat(self, update: Update) -> bool:
        """Copy the bytes of an update of the same layout, if the model lies in one block."""
        flat, bodies = self._current_flat(), update.bodies
        if flat is None or not bodies or any(body.device.type != "cpu" for body in bodies):
            return False
        self._overwrite(flat.write, bodies)
        return True

    def _current_flat(self) -> ContiguousTensors | None:
        """Return the block in which the model's tensors lie, if there is one."""
        if self._flat is None or not self._flat.holds(self._known.layout, self._named):
            self._flat = ContiguousTensors.find(self._known.layout, self._named)
        return self._flat

    def _write_whole(self, update: Update) -> None:
        movable = False
        if (
            self._may_consolidate
            and self._known.layout.body_nbytes >= _WORTHWHILE
            and update.bodies
        ):
            self._may_consolidate = False
            # What cannot be moved is written where it is.
            with suppress(ModelError):
                self._check_movable()
                movable = True
        self._overwrite(copy, self._tensors, update.tensors)
        if movable and not self._current_flat():
            # The version is written: without memory for a block, tensors stay where they are.
            with suppress(Exception):
                self._flat = ContiguousTensors.gather(self._known.layout, self._named)

    def _cast(self, update: Update) -> tuple[Update, Layout]:
        """The update in the dtypes of the model."""
        index, specs = self._known.layout.index, self._known.layout.specs
        tensors = [
            tensor.to(specs[index[spec.name]].dtype)
            for spec, tensor in zip(update.layout.specs, update.tensors, strict=True)
        ]
        layout = update.layout.with_tensors(tensors)
        return Update(layout, tensors), layout

    def _matched(self, update: Update) -> list[tuple[str, Tensor, Tensor]]:
        """Names, the model's tensors, and the update's."""
        index, tensors = update.layout.index, update.tensors
        prefixes = self._module_prefixes()
        return [
            (name, tensor, tensors[index[name]])
            for name, tensor in self._named.items()
            if name in index and not (is_extra_state(name) and name.startswith(prefixes))
        ]

    def _module_prefixes(self) -> tuple[str, ...]:
        return tuple(prefix for prefix, _ in self._modules)


def _same_names(left: Layout, right: Layout) -> bool:
    return left.names == right.names and left.aliases == right.aliases


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    copy([mine for mine, _ in pairs], [new for _, new in pairs])


Model = TypeVar("Model")


def consolidate(model: Model) -> Model:
    """Move the tensors of a module into one stretch of memory, in which they lie as they travel.

    A `Sender` of that model then packs by copying bytes instead of thousands of tensors; a scheme
    may also send them from where they are. Parameters keep their identity, and optimisers continue
    with them. If the module gets other tensors, or one is moved (`module.to`), it is sent tensor by
    tensor again.

    Call this before other threads use the module, and before anything else holds the memory of
    its tensors: nothing is moved then. Code that was given an address (`Tensor.data_ptr`) reads
    the old memory afterwards. The memory cannot be resized.

    Args:
        model: an `nn.Module`; or a mapping from names to modules, if that is what is sent.

    Returns:
        The model.

    Raises:
        ModelError: a tensor that cannot be moved, or whose memory something else holds (a
            `state_dict`, a view, an array, a backward pass that is still to come) or is (an
            array, a file); the message names it, and nothing was moved.

    Example:
        >>> policy = consolidate(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)))
        >>> with Sender("thread", policy, num_workers=1) as sender:
        ...     pending = sender.send_async()
        ...     version = Receiver(sender.address(0), torch.nn.Sequential(
        ...         torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))).receive()
        ...     pending.wait().updated
        (0,)
    """
    Binding(model).consolidate()
    return model
