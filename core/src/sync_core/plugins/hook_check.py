"""Reads which hooks a plugin implements, and refuses those that would never be called rightly."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import pluggy

from sync_core.errors import UnknownHookError
from sync_core.plugins import hookspecs
from sync_core.plugins.hookspecs import PROJECT

HOOKS = ("create_transport", "prepare_weights", "apply_weights", "skip_update")

# pluggy itself says what is marked, so that both see the same functions in every version of it.
_reader = pluggy.PluginManager(PROJECT)


def implemented(plugin: object) -> tuple[str, ...]:
    """The names of a plugin's functions that are marked as hook implementations."""
    return tuple(_marks(plugin))


def wraps(plugin: object, hook: str) -> bool:
    """Whether a plugin's implementation of a hook is a wrapper."""
    mark = _marks(plugin)[hook]
    return bool(mark["wrapper"] or mark["hookwrapper"])


def check_hooks(owner: str, plugin: object) -> tuple[str, ...]:
    """The names of a plugin's hooks, of which none is misspelt and all have fitting signatures.

    Args:
        owner: names the plugin in messages.
        plugin: an object, a class or a module.

    Raises:
        UnknownHookError: the message says what to write instead.
    """
    marks = _marks(plugin)
    for name, mark in marks.items():
        if name in HOOKS:
            _check_signature(owner, name, getattr(plugin, name))
        elif not mark["optionalhook"]:
            near = difflib.get_close_matches(name, HOOKS, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownHookError(
                f"{owner} implements {name!r}, which is no hook; {meant}"
                f"The hooks are: {', '.join(HOOKS)}"
            )
    return tuple(marks)


def _marks(plugin: object) -> dict[str, Any]:
    marks = {
        name: _reader.parse_hookimpl_opts(plugin, name)
        for name in dir(plugin)
        # Which pluggy 1.6 would compute.
        if not isinstance(inspect.getattr_static(plugin, name, None), property)
    }
    return {name: mark for name, mark in marks.items() if mark is not None}


def _check_signature(owner: str, hook: str, function: Any) -> None:
    wanted = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    given = [p for name, p in inspect.signature(function).parameters.items() if name != "self"]
    # What pluggy passes for a default or after a bare * depends on its version.
    if all(_is_plain(parameter) and parameter.name in wanted for parameter in given):
        return
    raise UnknownHookError(
        f"{owner} implements {hook}({', '.join(map(_written, given))}); the hook is "
        f"{hook}({', '.join(wanted)}), of which an implementation may leave out what it does "
        "not need, without defaults, * or **"
    )


def _is_plain(parameter: inspect.Parameter) -> bool:
    return (
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    )


def _written(parameter: inspect.Parameter) -> str:
    bare = parameter.replace(annotation=parameter.empty)
    return f"*, {bare}" if parameter.kind is parameter.KEYWORD_ONLY else str(bare)
