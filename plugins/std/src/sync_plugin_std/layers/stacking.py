"""The layers `Unstack` and `Stack`: one tensor for all experts of a layer, or one for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sync_core import Layout, ModelError
from sync_plugin_std.layers.regrouping import (
    Regrouping,
    TensorSource,
    add,
    check_template,
    compiled,
    filled,
    listed_names,
)


class Unstack(Regrouping):
    """Sends each slice of a tensor along its first dimension as a separate tensor.

    Transformers holds the experts of a layer in one tensor, and checkpoints, which engines load,
    have a name for each expert.

    Args:
        names: patterns of whole names, and the names of the slices: a template in which each ``*``
            stands for what that of the pattern matched, and ``#`` for the number of the slice.

    Raises:
        ValueError: a template has not exactly one ``#``, or more ``*`` than its pattern.

    Example:
        >>> import torch
        >>> from sync_core import Sender
        >>> layer = Unstack({"*experts.down_proj": "*experts.#.down_proj.weight"})
        >>> weights = {"experts.down_proj": torch.zeros(2, 4, 3)}
        >>> with Sender("thread", weights, num_workers=1, layers=[layer]) as sender:
        ...     [str(spec) for spec in sender.address(0).layout.specs]
        ['experts.0.down_proj.weight: float32[4, 3]', 'experts.1.down_proj.weight: float32[4, 3]']
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        for pattern, template in names.items():
            check_template(pattern, template)
            _check_number(template, pattern)
        self._rules = [(each, compiled(each), template) for each, template in names.items()]

    def _regroup(self, layout: Layout, *, strict: bool) -> dict[str, TensorSource]:
        found: dict[str, TensorSource] = {}
        unused = {rule for rule, _, _ in self._rules}
        for name, position in layout.index.items():
            matching = _first_match(self._rules, name)
            if matching is None:
                add(found, name, TensorSource((position,)))
                continue
            rule, template, matched = matching
            unused.discard(rule)
            shape = layout.specs[position].shape
            if not shape:
                raise ModelError(f"the layer Unstack needs a dimension, and {name!r} is a scalar")
            for index in range(shape[0]):
                # The text that "*" matched may contain "#" too.
                numbered = template.replace("#", str(index))
                add(
                    found,
                    filled(numbered, matched.groups()),
                    TensorSource((position,), index=index),
                )
        if strict and unused:
            raise ModelError(f"the layer Unstack finds no tensor for {sorted(unused)}")
        return found


class Stack(Regrouping):
    """Sends numbered tensors as one, along a new first dimension: the reverse of `Unstack`.

    Args:
        names: patterns of whole names, in which ``*`` stands for anything and ``#`` for the number
            of a tensor, from 0, and the name of the stack: a template in which each ``*`` stands
            for what that of the pattern matched.

    Raises:
        ValueError: a pattern has not exactly one ``#``, or fewer ``*`` than its template.

    Example:
        >>> import torch
        >>> from sync_core import Sender
        >>> layer = Stack({"*experts.#.down_proj.weight": "*experts.down_proj"})
        >>> weights = {f"experts.{i}.down_proj.weight": torch.zeros(4, 3) for i in range(2)}
        >>> with Sender("thread", weights, num_workers=1, layers=[layer]) as sender:
        ...     [str(spec) for spec in sender.address(0).layout.specs]
        ['experts.down_proj: float32[2, 4, 3]']
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        for pattern, template in names.items():
            check_template(pattern, template)
            _check_number(pattern, template)
        self._rules = [(each, _numbered(each), template) for each, template in names.items()]

    def _regroup(self, layout: Layout, *, strict: bool) -> dict[str, TensorSource]:
        found: dict[str, TensorSource | None] = {}
        stacks: dict[str, dict[int, int]] = {}
        unused = {rule for rule, _, _ in self._rules}
        for name, position in layout.index.items():
            matching = _first_match(self._rules, name)
            if matching is None:
                add(found, name, TensorSource((position,)))
                continue
            rule, template, matched = matching
            unused.discard(rule)
            number = int(matched["number"])
            groups = list(matched.groups())
            del groups[matched.re.groupindex["number"] - 1]
            stack = filled(template, groups)
            if stack not in stacks:
                # Its place among the others is that of its first part.
                add(found, stack, None)
            if number in stacks.setdefault(stack, {}):
                raise ModelError(f"two tensors would both be number {number} of {stack!r}")
            stacks[stack][number] = position
        if strict and unused:
            raise ModelError(f"the layer Stack finds no tensor for {sorted(unused)}")
        for stack, there in stacks.items():
            if lacking := [number for number in range(len(there)) if number not in there]:
                raise ModelError(
                    f"the layer Stack makes {stack!r} of the numbers 0 to {max(there)}, and "
                    f"{listed_names(lacking)} are missing"
                )
            positions = tuple(there[number] for number in sorted(there))
            kinds = {(layout.specs[p].dtype, layout.specs[p].shape) for p in positions}
            if len(kinds) > 1:
                listed = listed_names([str(layout.specs[p]) for p in positions])
                raise ModelError(f"the tensors of the stack {stack!r} must be alike, got {listed}")
            found[stack] = TensorSource(positions, stacked=True)
        return {name: source for name, source in found.items() if source is not None}


def _numbered(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern whose ``#`` stands for a number."""
    before, _, after = pattern.partition("#")
    return re.compile(f"{compiled(before).pattern}(?P<number>[0-9]+){compiled(after).pattern}")


def _first_match(
    rules: Sequence[tuple[str, re.Pattern[str], str]], name: str
) -> tuple[str, str, re.Match[str]] | None:
    """Return the first of the rules that matches, its template, and the match."""
    for rule, pattern, template in rules:
        if matched := pattern.fullmatch(name):
            return rule, template, matched
    return None


def _check_number(numbered: str, plain: str) -> None:
    if numbered.count("#") != 1 or "#" in plain:
        raise ValueError(
            f"{numbered!r} must have one '#', which stands for the number, and {plain!r} none"
        )
