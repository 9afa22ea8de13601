"""The features of a sender that few use: each is imported when an argument asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from sync_core import registry
from sync_core.errors import OptionError, PluginError
from sync_core.wrapping import SEPARATOR

if TYPE_CHECKING:
    from sync_core.sending.failure_policy import FailureHandler, OnFailure

# The similarity, from 0 to 1, from which a name is taken for another: that of `difflib`.
_ALIKE = 0.6
# Former arguments of a sender, and what to type now.
_RESTART = "on_failure=Restart(group, on_restart), with: from sync_plugin_std import Restart"
_MOVED = {
    "gather": "Sender(scheme, gathered(model)), with: from sync_core import gathered",
    "group": _RESTART,
    "on_restart": _RESTART,
    "ranks": "Sender(Sharded({scheme!r}, rank, size), …), with: from sync_plugin_scale import "
    "Sharded",
    "regions": "Sender(Sharded({scheme!r}, rank, size, regions=…), …), with: "
    "from sync_plugin_scale import Sharded",
    "partial": 'layers=[select("*")], with: from sync_plugin_std import select',
    "only": 'layers=["select"], which sends the parameters that are trained',
    "verify": 'layers=["checksum"], and "readback" before it to read workers\' models, too',
    "status": "StatusServer(sender).address, with: from sync_tools import StatusServer",
}


def with_near_miss(error: OptionError, arguments: Iterable[str], scheme: str) -> OptionError:
    """Return the error for an unknown option, with what the user may have meant.

    Args:
        error: the scheme's.
        arguments: those of the sender.
        scheme: its name.
    """
    name = error.unknown or ""
    if name in _MOVED:
        typed = _MOVED[name].format(scheme=scheme)
        return OptionError(f"Sender has no argument {name!r}; type {typed}")
    kinds = (
        (arguments, "{}=…"),
        (error.known, "{}=…"),
        (_installed(registry.LAYERS), "layers=[{!r}]"),
        (_installed(registry.SCHEMES), f'scheme="{{}}{SEPARATOR}{scheme}"'),
    )
    alike = [
        (SequenceMatcher(None, name.lower(), each).ratio(), -rank, each)
        for rank, (names, _) in enumerate(kinds)
        for each in names
    ]
    for ratio, rank, each in sorted(alike, reverse=True):
        if ratio < _ALIKE:
            break
        meant = kinds[-rank][1].format(each)
        if rank == -1:
            return OptionError(f"{error}; did you mean {meant}?")
        if rank > -3 or _wraps(each):
            return OptionError(f"Sender has no argument {name!r}; did you mean {meant}? ({error})")
    return error


def _installed(group: str) -> set[str]:
    return {entry.name for entry in registry.installed(group)}


def _wraps(scheme: str) -> bool:
    """Return whether a scheme wraps others, and so can be put in front of a chain."""
    try:
        registry.wrapper(scheme)
    except PluginError:
        return False
    return True


def failure_handler(on_failure: OnFailure) -> FailureHandler | None:
    """Return what acts on workers that fail; None where a send raises and no more."""
    if on_failure == "raise":
        return None
    from sync_core.sending.failure_policy import FailureHandler

    return FailureHandler(on_failure)
