"""The layers of one end of a sender: their order, their state, and which of them travel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

from sync_core import registry
from sync_core.errors import NotAPluginError
from sync_core.hooks import (
    HOOKS,
    PROJECT,
    ApplyContext,
    BindContext,
    hookimpl,
    implemented,
)
from sync_core.registry import Plugin
from sync_core.report import Reporter
from sync_core.weights.layout import Layout


def declares(capability: str, layers: Iterable[Plugin]) -> bool:
    """Return whether one of the layers declares a capability; layers need not declare any."""
    return any(capability in getattr(layer.object, "capabilities", ()) for layer in layers)


def found_layers(layers: Sequence[Any]) -> list[tuple[Any, Plugin]]:
    """Return layers and their plugins, with those that they name as ``followed_by``, each once.

    These come before others that travel, so that they are given what stays with the sender has
    made, and prove it where all others have restored it.
    """
    found = [(layer, registry.find(registry.LAYERS, layer)) for layer in layers]
    named = (getattr(plugin.object, "followed_by", ()) for _, plugin in found)
    names = dict.fromkeys(chain.from_iterable(named))
    followers = (
        (name, registry.find(registry.LAYERS, name)) for name in names if name not in layers
    )
    return [*followers, *found]


class LayerPlan:
    """The layers of a sender, resolved once: which of them prepare, in what order, which travel.

    Those that do not travel come first, since receivers cannot undo them. So the layout that a
    travelling layer is given is the one that receivers have after they have undone it, whatever
    the order in which the user gave the layers.

    Args:
        found: of `found_layers`, those that the scheme does not apply itself.
        context: of the sender.
    """

    def __init__(self, found: Sequence[tuple[Any, Plugin]], context: BindContext) -> None:
        #: The layers that are called with every report.
        self.reporters = [one.object for _, one in found if isinstance(one.object, Reporter)]
        # A reporter without hooks is nothing to a stack.
        hooked = [pair for pair in found if set(HOOKS) & {*implemented(pair[1].object)}]
        bound = [(given, bind(layer, context)) for given, layer in hooked]
        bound.sort(key=lambda pair: _travels(pair[1]))
        #: In the order in which they prepare.
        self.layers = [layer for _, layer in bound]
        #: The last of them, which receivers need, as the user gave them.
        self.travelling = tuple(given for given, layer in bound if _travels(layer))
        #: Whether workers may get less than the whole model.
        self.partial = declares("partial", self.layers)
        from_start = [i for i, one in enumerate(self.layers, 1) if declares("from_start", [one])]
        #: Those up to the last that needs values at version 0.
        self.from_start = self.layers[: max(from_start, default=0)]


def _travels(layer: Plugin) -> bool:
    """Return whether a layer is needed at the receiver's end, and so travels in the address."""
    return "apply_weights" in implemented(layer.object)


def bind(layer: Plugin, context: BindContext) -> Plugin:
    """The object of a layer, or of a scheme, for one end, as its ``bind`` makes it, if it has one.

    Raises:
        NotAPluginError: ``bind`` returned something without the plugin's hooks.
    """
    make: Callable[[BindContext], object] | None = getattr(layer.object, "bind", None)
    if make is None:
        return layer
    made = make(context)
    lacking = sorted(set(implemented(layer.object)) - set(implemented(made)))
    if lacking:
        raise NotAPluginError(
            f"{layer.describe()}: bind() returned a {type(made).__name__}, which lacks the hook "
            f"{lacking[0]}; return an object that has the plugin's hooks"
        )
    return replace(layer, object=made)


def with_layout(layer: Plugin, layout: Layout) -> Plugin:
    """The layer, whose `apply_weights` is given the layout that its `prepare_weights` was given."""
    function = layer.object.apply_weights
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    if "context" not in names:
        return layer

    def given(known: Mapping[str, Any]) -> dict[str, Any]:
        context: ApplyContext = known["context"]
        return {**{name: known[name] for name in names}, "context": replace(context, layout=layout)}

    def wrapper(update: Any, model: Any, context: Any) -> Generator[Any, Any, Any]:
        known = {"update": update, "model": model, "context": context}
        return (yield from function(**given(known)))

    def plain(update: Any, model: Any, context: Any) -> Any:
        return function(**given({"update": update, "model": model, "context": context}))

    mark = hookimpl(**getattr(function, f"{PROJECT}_impl"))
    marked = mark(wrapper if inspect.isgeneratorfunction(function) else plain)
    hooks = {name: getattr(layer.object, name) for name in implemented(layer.object)}
    return replace(layer, object=SimpleNamespace(**{**hooks, "apply_weights": marked}))
