"""Layers that send tensors under the workers' names and in their shapes."""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sync_core import BindContext, Layout, ModelError, Update, hookimpl
from sync_core.models import RegionSource

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Source:
    """The trainer's tensors that one sent tensor is made from.

    Args:
        positions: those of the trainer's tensors, which are concatenated.
        rows: the first row that is taken and how many are; None for all.
        transposed: whether the two dimensions change places.
    """

    positions: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transposed: bool = False

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor; a view, or the trainer's own, where no bytes are to be moved."""
        if len(self.positions) > 1:
            return torch.cat([tensors[position].detach() for position in self.positions])
        tensor = tensors[self.positions[0]]
        if self.rows is not None:
            return tensor.detach().narrow(0, *self.rows)
        return tensor.detach().t() if self.transposed else tensor


class _Regrouping:
    """Makes each tensor that is sent from one or several of the trainer's.

    The plan is made once for each layout. The layer stays with the sender: workers need not have
    it.
    """

    capabilities = frozenset({"regions"})
    _known: tuple[Layout, Layout, list[_Source]] | None = None

    @abstractmethod
    def _regroup(self, layout: Layout) -> dict[str, _Source]:
        """Return, by the name of each tensor that is sent, how it is made.

        Raises:
            ModelError: that cannot be said of every tensor.
        """

    def bind(self, context: BindContext) -> Self:
        """A layer with a plan of its own, for one sender."""
        del context
        return copy.copy(self)

    def region_sources(self, layout: Layout) -> dict[str, list[RegionSource]]:
        """Return, by the name of each tensor that is sent, the regions that it is made of.

        Args:
            layout: of the trainer's tensors, where each rank has a part of them.

        Raises:
            ModelError: a tensor is transposed, so that it is not a region of another.
        """
        return {
            name: list(_regions(name, source, layout))
            for name, source in self._regroup(layout).items()
        }

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        """Make the tensors to send."""
        update = yield
        tensors = update.tensors
        if self._known is None or self._known[0] is not update.layout:
            sources = self._regroup(update.layout)
            layout = Layout.of({name: source.make(tensors) for name, source in sources.items()})
            self._known = update.layout, layout, [sources[spec.name] for spec in layout.specs]
        _, layout, made_of = self._known
        update.become(layout, [source.make(tensors) for source in made_of])
        return update


class Rename(_Regrouping):
    """Sends tensors under other names, or not at all.

    Args:
        names: patterns of whole names, of which the first that matches counts, and what a tensor
            is sent as: a template in which each ``*`` stands for what that of the pattern matched,
            or None to leave it out on purpose.
        strict: whether a name that no pattern matches is an error; else it is sent as it is.

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
            if template is not None and template.count("*") > pattern.count("*"):
                raise ValueError(
                    f"{template!r} has more '*' than {pattern!r}, the pattern that it is for"
                )
        self._rules = [(_compiled(pattern), template) for pattern, template in names.items()]
        self._strict = strict

    def _regroup(self, layout: Layout) -> dict[str, _Source]:
        found: dict[str, _Source] = {}
        sent_as: dict[str, str] = {}
        unmatched: list[str] = []
        for name in layout.names:
            new: str | None = name
            for pattern, template in self._rules:
                if matched := pattern.fullmatch(name):
                    new = _filled(template, matched)
                    break
            else:
                unmatched.append(name)
            if new is None:
                continue
            if new in found:
                raise ModelError(f"{sent_as[new]!r} and {name!r} would both be sent as {new!r}")
            found[new], sent_as[new] = _Source((layout.index[name],)), name
        if unmatched and self._strict:
            raise ModelError(
                f"no pattern of the layer Rename matches {_listed(unmatched)}; add one (None "
                "leaves a tensor out), or give strict=False to send them as they are"
            )
        return found


class Fuse(_Regrouping):
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

    def _regroup(self, layout: Layout) -> dict[str, _Source]:
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
                raise ModelError(
                    f"the layer Fuse makes {fused!r} of {wanted}, and {lacking} are missing; give "
                    "the names of parts that the model has"
                )
            found[fused] = tuple(there[part] for part in wanted)
        return {name: _Source(positions) for name, positions in found.items()}


class Split(_Regrouping):
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

    def _regroup(self, layout: Layout) -> dict[str, _Source]:
        found: dict[str, _Source] = {}
        used: set[str] = set()
        for name, position in layout.index.items():
            shape = list(layout.specs[position].shape)
            whole = next((each for each in name.split(".") if each in self._parts), None)
            if whole is None:
                _add(found, name, _Source((position,)))
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
                _add(found, part_name, _Source((position,), (first, count)))
                first += count
        if unused := self._parts.keys() - used:
            raise ModelError(f"the layer Split finds no {sorted(unused)} among the weights")
        return found


class Transpose(_Regrouping):
    """Sends matrices with their two dimensions exchanged.

    Linear layers of some libraries hold ``(in, out)``, as GPT-2's ``Conv1D`` does, those of others
    ``(out, in)``.

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
        self._patterns = {each: _compiled(each) for each in (name, *names)}

    def _regroup(self, layout: Layout) -> dict[str, _Source]:
        found: dict[str, _Source] = {}
        unused = set(self._patterns)
        for name, position in layout.index.items():
            shape = list(layout.specs[position].shape)
            matching = {each for each, p in self._patterns.items() if p.fullmatch(name)}
            if matching and len(shape) != 2:
                raise ModelError(
                    f"the layer Transpose exchanges two dimensions, and {name!r} has "
                    f"{len(shape)}: {shape}"
                )
            found[name] = _Source((position,), transposed=bool(matching))
            unused -= matching
        if unused:
            raise ModelError(f"the layer Transpose finds no tensor for {sorted(unused)}")
        return found


def _regions(name: str, source: _Source, layout: Layout) -> Iterator[RegionSource]:
    if source.transposed:
        raise ModelError(f"{name!r} is transposed, which is not possible with ranks=")
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


def _add(found: dict[str, _Source], name: str, source: _Source) -> None:
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


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))))


def _filled(template: str | None, matched: re.Match[str]) -> str | None:
    if template is None:
        return None
    first, *rest = template.split("*")
    return first + "".join(
        group + piece for group, piece in zip(matched.groups(), rest, strict=False)
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
