"""The layers of one end of a sender: their order, their state, and the layouts they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sync_core import registry
from sync_core.errors import NotAPluginError
from sync_core.hooks import (
    PROJECT,
    ApplyContext,
    BindContext,
    SendContext,
    hookimpl,
    implemented,
)
from sync_core.registry import Plugin
from sync_core.stack import PluginStack
from sync_core.weights.extras import attached
from sync_core.weights.layout import Layout
from sync_core.weights.payload import Update

__all__ = [
    "bind",
    "declares",
    "in_order",
    "layouts_before",
    "travels",
    "with_followers",
    "with_layout",
]


def travels(layer: Plugin) -> bool:
    """Return whether a layer is needed at the receiver's end, and so travels in the address."""
    return "apply_weights" in implemented(layer.object)


def declares(capability: str, layers: Iterable[Plugin]) -> bool:
    """Return whether one of the layers declares a capability; layers need not declare any."""
    return any(capability in getattr(layer.object, "capabilities", ()) for layer in layers)


def with_followers(layers: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Plugin, ...]]:
    """Return layers and their plugins, with those that they name as ``followed_by``, each once.

    These come before others that travel, so that they are given what stays with the sender has
    made, and prove it where all others have restored it.
    """
    found = [registry.find(registry.LAYERS, layer) for layer in layers]
    names: dict[str, None] = {}
    for layer in found:
        names |= dict.fromkeys(getattr(layer.object, "followed_by", ()))
    followers = tuple(name for name in names if name not in layers)
    plugins = (registry.find(registry.LAYERS, name) for name in followers)
    return (*followers, *layers), (*plugins, *found)


def in_order(layers: Iterable[Plugin]) -> list[Plugin]:
    """The layers in the order in which they prepare: those that do not travel come first.

    Receivers cannot undo those. So the layout that a travelling layer is given is the one that
    receivers have after they have undone it, whatever the order in which the user gave the layers.
    """
    return sorted(layers, key=travels)


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


def layouts_before(
    defaults: object,
    backend: Plugin,
    layers: Sequence[Plugin],
    update: Update,
    context: SendContext,
) -> list[Layout]:
    """Prepare an update only for its layouts: what each layer is given, and last what travels.

    Args:
        defaults: see `sync_core.stack.PluginStack`.
        backend: the scheme.
        layers: in the order in which they prepare.
        update: the weights.
        context: of version 0.
    """
    seen = [_LayoutBefore() for _ in layers]
    watched: list[Plugin] = []
    for recorder, layer in zip(seen, layers, strict=True):
        watched += [Plugin(registry.LAYERS, "layout", recorder), layer]
    prepared = PluginStack(defaults, backend, watched).prepare_weights(update, context)
    return [*(recorder.layout for recorder in seen), attached(prepared)[0]]


class _LayoutBefore:
    """Notes the layout that the next layer is given."""

    layout = Layout(())

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        update = yield
        self.layout = update.layout
        return update
