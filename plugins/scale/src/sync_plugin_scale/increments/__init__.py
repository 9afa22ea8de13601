"""Incremental versions: workers are sent only the parts that they lack.

One rule: the sender knows in which version each part last changed, and for each worker the version
that it holds completely; a worker needs the parts that changed after that. Parts are units of the
packed bytes. Reading begins in `sender`: `history` keeps the newest version and what changed,
`patch` is what travels, and `receiver` applies it.

Exported is the kit of schemes that keep increments themselves: `IncrementHistory` makes a `Patch`,
which turns a `PackedVersion` into a newer one.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_plugin_scale.increments.history import IncrementHistory, PackedVersion
    from sync_plugin_scale.increments.patch import Patch

_MODULES = {
    "sync_plugin_scale.increments.history": ("IncrementHistory", "PackedVersion"),
    "sync_plugin_scale.increments.patch": ("Patch",),
}

__all__ = ["IncrementHistory", "PackedVersion", "Patch"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
