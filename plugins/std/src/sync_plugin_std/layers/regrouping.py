"""Layers that send tensors under the workers' names and in their shapes."""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor

from sync_core import BindContext, Layout, ModelError, Update, hookimpl
from sync_core.models import RegionSource

_SHOWN = 8
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The trainer's tensors that one sent tensor is made from.

    Args:
        positions: those of the trainer's tensors, which are concatenated.
        rows: the first row that is taken and how many are; None for all.
        transposed: whether the last two dimensions change places.
        stacked: whether the tensors are put along a new first dimension instead of concatenated.
        index: the place in the first dimension that is taken, which removes that dimension.
    """

    positions: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transposed: bool = False
    stacked: bool = False
    index: int | None = None

    @property
    def is_whole(self) -> bool:
        """True if the tensor is one of the trainer's, unchanged."""
        return self == TensorSource(self.positions[:1])

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor; a view, or the trainer's tensor itself, if no bytes move."""
        if self.stacked:
            return torch.stack([tensors[position].detach() for position in self.positions])
        if len(self.positions) > 1:
            return torch.cat([tensors[position].detach() for position in self.positions])
        tensor = tensors[self.positions[0]]
        if self.rows is not None:
            return tensor.detach().narrow(0, *self.rows)
        if self.index is not None:
            return tensor.detach().select(0, self.index)
        return tensor.detach().transpose(-2, -1) if self.transposed else tensor


class Regrouping:
    """Makes each tensor that is sent from one or several of the trainer's.

    The plan is made once for each layout. The layer stays with the sender: workers need not have
    it.
    """

    capabilities = frozenset({"regions"})
    _known: tuple[Layout, Layout, list[TensorSource]] | None = None

    @abstractmethod
    def _regroup(self, layout: Layout, *, strict: bool) -> dict[str, TensorSource]:
        """Return, by the name of each tensor that is sent, how it is made.

        Args:
            layout: of the trainer's tensors.
            strict: whether those are all tensors, so that a pattern without a match is an error; an
                update after a layer such as ``select`` has fewer.

        Raises:
            ModelError: that cannot be said of every tensor.
        """

    def bind(self, context: BindContext) -> Self:
        """Return a copy with a separate plan, for one sender."""
        del context
        return copy.copy(self)

    def region_sources(self, layout: Layout) -> dict[str, list[RegionSource]]:
        """Return, by the name of each tensor that is sent, the regions that it is made of.

        Args:
            layout: of the trainer's tensors, where each rank has a part of them.

        Raises:
            ModelError: a tensor is not a region of others: it is transposed, or has another number
                of dimensions.
        """
        return {
            name: list(_regions(name, source, layout))
            for name, source in self._regroup(layout, strict=True).items()
        }

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        """Make the tensors to send."""
        update = yield
        tensors = update.tensors
        if self._known is None or self._known[0] is not update.layout:
            # Elements of an expanded tensor, such as a stand-in for weights to come, have one
            # address, so that parts of it would look tied.
            tensors = tuple(t.contiguous() if 0 in t.stride() else t for t in tensors)
            sources = self._regroup(update.layout, strict=self._known is None)
            self._check_blocks(update.layout, sources)
            layout = Layout.of({name: source.make(tensors) for name, source in sources.items()})
            self._known = update.layout, layout, [sources[spec.name] for spec in layout.specs]
        _, layout, made_of = self._known
        update.become(layout, [source.make(tensors) for source in made_of])
        return update

    def _check_blocks(self, layout: Layout, sources: Mapping[str, TensorSource]) -> None:
        """Refuse to cut, join or turn a matrix with a scale for each of its blocks."""
        for source in sources.values():
            name = layout.specs[source.positions[0]].name
            if not source.is_whole and f"{name}_scale_inv" in layout.index:
                owner = type(self).__name__
                raise ModelError(
                    f"the layer {owner} cannot follow one that quantises: {name!r} has a scale for "
                    f"each block, and {owner} would move its rows to other blocks; put the layer "
                    f"{owner} before fp8"
                )


class Rename(Regrouping):
    """Sends tensors under other names, or not at all.

    Args:
        names: patterns of whole names, of which the first that matches counts, and what a tensor
            is sent as: a template in which each ``*`` stands for what that of the pattern matched,
            or None to leave it out on purpose.
        strict: whether a name that no pattern matches is an error; else it is sent as it is.

    A pattern that matches no name is an error when the sender is made.

    Raises:
        ValueError: a template has more ``*`` than its pattern.

    Example:
        >>> from sync_core import Sender
        >>> layer = Rename({"model.*": "*", "value_head.*": None})
        >>> model = torch.nn.ModuleDict(
        ...     {"model": torch.nn.Linear(2, 1), "value_head": torch.nn.Linear(2, 1)})
        >>> with Sender("thread", model, num_workers=1, layers=[layer]) as sender:
        ...     sender.address(0).layout.names
        ('weight', 'bias')
    """

    def __init__(self, names: Mapping[str, str | None], *, strict: bool = True) -> None:
        for pattern, template in names.items():
            if template is not None:
                check_template(pattern, template)
        self._patterns = {pattern: compiled(pattern) for pattern in names}
        self._rules = list(zip(self._patterns.values(), names.values(), strict=True))
        self._strict = strict

    def _regroup(self, layout: Layout, *, strict: bool) -> dict[str, TensorSource]:
        found: dict[str, TensorSource] = {}
        sent_as: dict[str, str] = {}
        unmatched: list[str] = []
        for name in layout.names:
            new: str | None = name
            for pattern, template in self._rules:
                if matched := pattern.fullmatch(name):
                    new = None if template is None else filled(template, matched.groups())
                    break
            else:
                unmatched.append(name)
            if new is None:
                continue
            if new in found:
                raise ModelError(f"{sent_as[new]!r} and {name!r} would both be sent as {new!r}")
            found[new], sent_as[new] = TensorSource((layout.index[name],)), name
        # A name without a match is an error in any update.
        if unmatched and self._strict:
            raise ModelError(
                f"no pattern of the layer Rename matches {listed_names(unmatched)}; add one (None "
                "leaves a tensor out), or give strict=False to send them as they are"
            )
        if strict:
            check_matches(self, self._patterns, layout.names)
        return found


class Fuse(Regrouping):
    """Sends several tensors as one, concatenated along their first dimension.

    Inference engines hold the projections of queries, keys and values in one tensor.

    Args:
        parts: the name of a fused module, and those of its parts in order. They are components of
            dotted names: ``{"qkv_proj": ("q_proj", "k_proj", "v_proj")}``.

    Example:
        >>> from sync_core import Sender
        >>> model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 2) for name in "qkv"})
        >>> layer = Fuse({"qkv": ("q", "k", "v")})
        >>> with Sender("thread", model, num_workers=1, layers=[layer]) as sender:
        ...     [str(spec) for spec in sender.address(0).layout.specs]
        ['qkv.weight: float32[6, 4]', 'qkv.bias: float32[6]']
    """

    def __init__(self, parts: Mapping[str, Sequence[str]]) -> None:
        self._parts = {whole: tuple(names) for whole, names in parts.items()}
        self._whole = {part: whole for whole, names in self._parts.items() for part in names}

    def _regroup(self, layout: Layout, *, strict: bool) -> dict[str, TensorSource]:
        found: dict[str, tuple[int, ...]] = {}
        parts: dict[str, dict[str, int]] = {}
        for name in layout.names:
            fused, part = _replaced(name, self._whole)
            if part is None:
                found[name] = (layout.index[name],)
            else:
                # Its place among the others is that of its first part.
                found.setdefault(fused, ())
                parts.setdefault(fused, {})[part] = layout.index[name]
        for fused, there in parts.items():
            if found[fused]:
                raise ModelError(
                    f"{fused!r} is in the weights, and so are parts of it; rename one of them, or "
                    f"leave it out: rename({{{fused!r}: None}}, strict=False)"
                )
            wanted = self._parts[self._whole[next(iter(there))]]
            if lacking := [part for part in wanted if part not in there]:
                remedy = (
                    "give the names of parts that the model has"
                    if strict
                    else "put the layer that leaves tensors out after Fuse"
                )
                raise ModelError(
                    f"the layer Fuse makes {fused!r} of {wanted}, and {lacking} are missing; "
                    f"{remedy}"
                )
            found[fused] = tuple(there[part] for part in wanted)
        used = {self._whole[part] for there in parts.values() for part in there}
        if strict and (unused := self._parts.keys() - used):
            listed = {name: self._parts[name] for name in sorted(unused)}
            raise ModelError(
                f"the layer Fuse finds no part of {listed} among the weights; a part is one "
                "component of a dotted name, such as 'q_proj'"
            )
        return {name: TensorSource(positions) for name, positions in found.items()}


class Split(Regrouping):
    """Sends one tensor as several, cut along its first dimension: the reverse of `Fuse`.

    Args:
        parts: the name of a fused module, and those of its parts in order, each with its number of
            rows. Names are components of dotted names:
            ``{"qkv_proj": {"q_proj": 2048, "k_proj": 512, "v_proj": 512}}``.

    Example:
        >>> from sync_core import Sender
        >>> model = torch.nn.ModuleDict({"qkv": torch.nn.Linear(4, 8)})
        >>> layer = Split({"qkv": {"q": 4, "k": 2, "v": 2}})
        >>> with Sender("thread", model, num_workers=1, layers=[layer]) as sender:
        ...     sender.address(0).layout.names
        ('q.weight', 'k.weight', 'v.weight', 'q.bias', 'k.bias', 'v.bias')
    """

    def __init__(self, parts: Mapping[str, Mapping[str, int]]) -> None:
        self._parts = {whole: dict(rows) for whole, rows in parts.items()}

    def _regroup(self, layout: Layout, *, strict: bool) -> dict[str, TensorSource]:
        found: dict[str, TensorSource] = {}
        used: set[str] = set()
        for name, position in layout.index.items():
            shape = list(layout.specs[position].shape)
            whole = next((each for each in name.split(".") if each in self._parts), None)
            if whole is None:
                add(found, name, TensorSource((position,)))
                continue
            used.add(whole)
            rows = self._parts[whole]
            if shape[:1] != [sum(rows.values())]:
                raise ModelError(
                    f"{name!r} has the shape {shape}, and the layer Split is to cut "
                    f"{sum(rows.values())} rows of it: {rows}"
                )
            first = 0
            for part, count in rows.items():
                part_name, _ = _replaced(name, {whole: part})
                add(found, part_name, TensorSource((position,), (first, count)))
                first += count
        if strict and (unused := self._parts.keys() - used):
            raise ModelError(f"the layer Split finds no {sorted(unused)} among the weights")
        return found


class Transpose(Regrouping):
    """Sends matrices, or stacks of matrices, with their last two dimensions exchanged.

    Linear layers of some libraries hold ``(in, out)``, as GPT-2's ``Conv1D`` and the experts of
    gpt-oss do, those of others ``(out, in)``.

    Args:
        name: a pattern of the whole names of matrices; each ``*`` stands for anything.
        names: more of these.

    Example:
        >>> from sync_core import Sender
        >>> layer = Transpose("*.c_attn.weight")
        >>> weights = {"h.0.c_attn.weight": torch.zeros(2, 6), "h.0.c_attn.bias": torch.zeros(6)}
        >>> with Sender("thread", weights, num_workers=1, layers=[layer]) as sender:
        ...     [str(spec) for spec in sender.address(0).layout.specs]
        ['h.0.c_attn.weight: float32[6, 2]', 'h.0.c_attn.bias: float32[6]']
    """

    def __init__(self, name: str, /, *names: str) -> None:
        self._patterns = {each: compiled(each) for each in (name, *names)}

    def _regroup(self, layout: Layout, *, strict: bool) -> dict[str, TensorSource]:
        found: dict[str, TensorSource] = {}
        unused = set(self._patterns)
        for name, position in layout.index.items():
            shape = list(layout.specs[position].shape)
            matching = {each for each, p in self._patterns.items() if p.fullmatch(name)}
            if matching and len(shape) < 2:
                raise ModelError(
                    f"the layer Transpose exchanges the last two dimensions, and {name!r} has "
                    f"{len(shape)}: {shape}"
                )
            found[name] = TensorSource((position,), transposed=bool(matching))
            unused -= matching
        if strict and unused:
            raise ModelError(f"the layer Transpose finds no tensor for {sorted(unused)}")
        return found


def _regions(name: str, source: TensorSource, layout: Layout) -> Iterator[RegionSource]:
    if source.transposed or source.stacked or source.index is not None:
        done = "transposed" if source.transposed else "stacked" if source.stacked else "unstacked"
        raise ModelError(f"{name!r} is {done}, which is not possible for parts of tensors")
    row = 0
    for position in source.positions:
        spec = layout.specs[position]
        region = tuple((0, size) for size in spec.shape)
        if source.rows is not None:
            first, count = source.rows
            region = ((first, first + count), *region[1:])
        start = (row, *[0] * (len(region) - 1)) if region else ()
        yield RegionSource(spec.name, region, start)
        row += region[0][1] - region[0][0] if region else 0


def add(found: dict[str, _Found], name: str, source: _Found) -> None:
    """Add a tensor that is sent, unless another has its name."""
    if name in found:
        raise ModelError(f"two tensors would both be sent as {name!r}")
    found[name] = source


def _replaced(name: str, components: Mapping[str, str]) -> tuple[str, str | None]:
    """The name with its first component of these replaced, and that; None where it has none."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in components:
            return ".".join([*parts[:i], components[part], *parts[i + 1 :]]), part
    return name, None


def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern, with a group for each ``*``."""
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))))


def check_matches(
    layer: object, patterns: Mapping[str, re.Pattern[str]], names: Sequence[str]
) -> None:
    """Raise `ModelError` where a pattern of a layer matches none of these names."""
    unused = tuple(n for n, each in patterns.items() if not any(map(each.fullmatch, names)))
    if unused:
        raise ModelError(
            f"none of these patterns of the layer {type(layer).__name__}, {unused}, matches one of "
            f"{len(names)} names, such as {names[0]!r}; correct them, or leave them out"
        )


def filled(template: str, groups: Sequence[str]) -> str:
    """A template with what each ``*`` of a pattern matched."""
    first, *rest = template.split("*")
    return first + "".join(group + piece for group, piece in zip(groups, rest, strict=False))


def check_template(pattern: str, template: str) -> None:
    """Raise `ValueError` for a template with a ``*`` that stands for nothing."""
    if template.count("*") > pattern.count("*"):
        raise ValueError(f"{template!r} has more '*' than {pattern!r}, the pattern that it is for")


def listed_names(names: Sequence[object]) -> str:
    """The first of some names, and how many follow."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
