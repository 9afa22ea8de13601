"""The layers `Rename` and `Fuse`: tensors travel under the names that the workers have."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from sync_core import Layout, ModelError, Update, hookimpl

_SHOWN = 8


class _Regrouping:
    """Makes each tensor that travels of one or several of the trainer's.

    The plan is made once for each layout. The layer stays with the sender: workers need not have
    it.
    """

    _known: tuple[Layout, Layout, list[tuple[int, ...]]] | None = None

    @abstractmethod
    def _regroup(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        """For each name that travels, the positions of the tensors that it is made of.

        Raises:
            ModelError: that cannot be said of every tensor.
        """

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        """Make the tensors that travel."""
        update = yield
        tensors = update.tensors
        if self._known is None or self._known[0] is not update.layout:
            groups = self._regroup(update.layout)
            layout = Layout.of({name: _made(tensors, group) for name, group in groups.items()})
            self._known = update.layout, layout, [groups[spec.name] for spec in layout.specs]
        _, layout, made_of = self._known
        update.become(layout, [_made(tensors, group) for group in made_of])
        return update


def _made(tensors: Sequence[Tensor], group: tuple[int, ...]) -> Tensor:
    if len(group) == 1:
        return tensors[group[0]]
    return torch.cat([tensors[position].detach() for position in group])


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

    def _regroup(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
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
            found[new], sent_as[new] = (layout.index[name],), name
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

    def _regroup(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        parts: dict[str, dict[str, int]] = {}
        for name in layout.names:
            fused, part = self._find(name)
            if part is None:
                found[name] = (layout.index[name],)
            else:
                # Its place among the others is that of its first part.
                found.setdefault(fused, ())
                parts.setdefault(fused, {})[part] = layout.index[name]
        for fused, there in parts.items():
            if found[fused]:
                raise ModelError(f"{fused!r} is in the weights, and so are parts to make it of")
            wanted = self._parts[self._whole[next(iter(there))]]
            if lacking := [part for part in wanted if part not in there]:
                raise ModelError(f"{fused!r} is to be made of {wanted}, and {lacking} are missing")
            found[fused] = tuple(there[part] for part in wanted)
        return found

    def _find(self, name: str) -> tuple[str, str | None]:
        """The name of the fused tensor, and which part of it this is; None for no part."""
        components = name.split(".")
        for i, component in enumerate(components):
            if component in self._whole:
                whole = self._whole[component]
                return ".".join([*components[:i], whole, *components[i + 1 :]]), component
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
